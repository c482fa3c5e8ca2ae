"""Pictures in the form of paper B's figures."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib import image, pyplot

from hvdtrain.errors import DataError
from hvdtrain.study.paper_b import figures
from hvdtrain.study.paper_b.figures import Measured, draw
from hvdtrain.study.paper_b.predicted import predict
from hvdtrain.study.plots import COLOURS
from hvdtrain.study.results import Epoch
from tests.pure.study.test_series import a_run
from tests.single.study.test_plan_pictures import colours


def test_the_figures_of_the_paper_are_drawn(tmp_path: Path) -> None:
    prediction = predict("vit_b16")
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    names = draw(alone, [prediction], {})
    assert set(names) == {f"figure{number}.png" for number in (1, 2, 3, 5, 6)}
    assert all((alone / name).stat().st_size > 5000 for name in names)
    measured = {"single": Measured(800, 0, 9.5), "an arm of ours": Measured(700, 0.2, 5)}
    speedups = {"vit_b16": {"DP": {1: 1.0, 2: 1.7}}}
    assert draw(together, [prediction], {"vit_b16": measured}, speedups=speedups) == names
    for name in ("figure1.png", "figure3.png", "figure5.png"):  # a row of panels more
        heights = [image.imread(folder / name).shape[0] for folder in (alone, together)]
        assert heights[1] > 1.5 * heights[0]
    assert COLOURS[5] in colours(together / "figure1.png")  # the arm that the paper has not
    assert COLOURS[5] not in colours(alone / "figure1.png")
    with pytest.raises(DataError, match="cannot be written"):
        draw(tmp_path / "absent", [prediction], {})


def test_accuracy_is_drawn_by_model(tmp_path: Path) -> None:
    """Figure 4: a curve per strategy, and other figures as without it."""
    arms = {}
    for name, best in (("single", 0.2), ("DP", 0.4)):
        epochs = tuple(Epoch(number, 1.0, 1.0, best / (3 - number)) for number in (1, 2))
        arms[name] = [a_run(1, 100, epochs=epochs)]
    measured = {"resnet18": {"single": Measured(9, 0, 1)}}
    captions = draw(tmp_path, [], measured, accuracy={"resnet18": arms})
    assert list(captions) == [f"figure{n}.png" for n in ("1", "3", "4-resnet18", "5")]
    assert "resnet18 by epoch, measured" in captions["figure4-resnet18.png"]
    assert set(COLOURS[:2]) <= colours(tmp_path / "figure4-resnet18.png")


def test_marks_are_at_the_papers_values() -> None:
    figure, axes = pyplot.subplots()
    values = {name: Measured(1.0, 0.5, 2.0) for name in ("an arm of ours", "adaptive", "DP")}
    panel = figures.Panel("resnet50", values, is_predicted=False)
    assert panel.names == ["DP", "adaptive", "an arm of ours"]
    figures._paper(axes, panel, figures._percent)
    (marks,) = axes.lines
    assert marks.get_xydata() == pytest.approx(np.array([[0, 42.3], [1, 27.1]]))
    figures._paper(axes, figures.Panel("resnet18", values, False), figures._percent)
    assert len(axes.lines) == 1  # table I has no such model
    pyplot.close(figure)
