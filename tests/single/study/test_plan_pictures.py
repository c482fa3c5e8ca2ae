"""Pictures of plans."""

from pathlib import Path

import pytest
from matplotlib import image

from hvdtrain.errors import DataError
from hvdtrain.plan.plan import Plan, Stage
from hvdtrain.study.plots import COLOURS, draw_strategies
from tests.conftest import Program

PLAN = Plan(
    (
        Stage(("stem", "layer1"), (0, 1, 2), (2, 1, 1)),
        Stage(("layer2",), (0, 1), (1, 1)),
        Stage(("head",), (2,), (1,)),
    )
)


def colours(path: Path) -> set[str]:
    """Return the colours that fill more than 0.2 % of a picture."""
    pixels = (255 * image.imread(path)[..., :3]).round().astype(int).reshape(-1, 3)
    counts: dict[str, int] = {}
    for red, green, blue in pixels[::7]:
        name = f"#{red:02X}{green:02X}{blue:02X}"
        counts[name] = counts.get(name, 0) + 1
    return {name for name, count in counts.items() if count > len(pixels) / 7 / 500}


def test_each_label_has_its_colour(tmp_path: Path) -> None:
    draw_strategies(PLAN, tmp_path / "plan.png")
    assert set(COLOURS[1:4]) <= colours(tmp_path / "plan.png")
    with pytest.raises(DataError, match="cannot be written"):
        draw_strategies(PLAN, tmp_path / "absent" / "plan.png")


@pytest.mark.proves(
    "`plan show` explains and draws a plan, and `plan simulate --cluster` predicts five "
    "strategies for hardware that you do not have."
)
def test_plan_show_explains_and_draws(hvdtrain: Program, tmp_path: Path) -> None:
    picture, saved = tmp_path / "plan.png", tmp_path / "plan.json"
    options = ("--model", "vit_tiny", "--cluster", "16-cpu-10g", "--ranks", 4, "--batch-size", 16)
    done = hvdtrain(
        *("plan", "show", *options, "--plan", "auto", "--explain"),
        *("--picture", picture, "--save", saved),
    )
    assert done.returncode == 0, done.stderr
    for words in ("forward ms", "block0.attention", "chosen: ", "paper B's sum", "predictions"):
        assert words in done.stdout
    assert picture.stat().st_size > 5000
    done = hvdtrain("plan", "show", *options, "--plan", saved, "--explain")
    assert done.returncode == 0, done.stderr
    assert "--plan auto would choose the same" in done.stdout
    done = hvdtrain("plan", "show", *options, "--plan", "dp")
    assert done.returncode == 2
    assert (
        done.stderr
        == "hvdtrain: plan show --cluster needs --explain: add --explain, or use plan simulate\n"
    )


def test_a_cluster_is_simulated(hvdtrain: Program) -> None:
    options = ("--model", "cnn", "--cluster", "8-v100", "--ranks", 8, "--batch-size", 256)
    done = hvdtrain("plan", "simulate", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split() == ["single", "DP", "MP", "hybrid", "chosen"]
    assert done.stdout.rstrip().endswith("not measurements.")
