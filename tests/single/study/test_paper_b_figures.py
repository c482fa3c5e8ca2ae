"""Pictures in the form of paper B's figures."""

from pathlib import Path

import pytest
from matplotlib import image

from hvdtrain.errors import DataError
from hvdtrain.study.paper_b.plans import Measured
from hvdtrain.study.paper_b.report import draw_figures
from hvdtrain.study.paper_b.v100 import predict
from hvdtrain.study.plots import COLOURS
from hvdtrain.study.results import Epoch
from tests.pure.study.test_series import a_run
from tests.single.study.test_plan_pictures import colours


def test_the_figures_of_the_paper_are_drawn(tmp_path: Path) -> None:
    predictions = [predict("vit_b16")]
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    captions = draw_figures(alone, predictions, [])
    assert set(captions) == {f"figure{number}.png" for number in (1, 2, 3, 5, 6)}
    assert all((alone / name).stat().st_size > 5000 for name in captions)
    timed = {}
    for place, name in enumerate(("single", "DP", "figure 6")):
        epochs = tuple(Epoch(number, 1.0, 1.0, (number + place) / 10) for number in (1, 2))
        timed[name] = [a_run(1, 100, epochs=epochs, step_seconds=0.1)]
    accuracy = {name: timed[name] for name in ("single", "DP")}
    models = [Measured(name, 2, timed, accuracy) for name in ("cnn", "vit")]
    captions = draw_figures(together, predictions, models)
    assert {"figure4-cnn.png", "figure4-vit.png"} < set(captions)
    assert "Accuracy of cnn by epoch, measured" in captions["figure4-cnn.png"]
    assert set(COLOURS[:2]) <= colours(together / "figure4-cnn.png")
    for name in ("figure1.png", "figure3.png", "figure5.png"):  # a row of panels more
        heights = [image.imread(folder / name).shape[0] for folder in (alone, together)]
        assert heights[1] > 1.5 * heights[0]
    assert COLOURS[5] in colours(together / "figure1.png")  # the arm that the paper has not
    assert COLOURS[5] not in colours(alone / "figure1.png")
    with pytest.raises(DataError, match="cannot be written"):
        draw_figures(tmp_path / "absent", predictions, [])
