"""Complete runs with other targets than class labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain import data
from hvdtrain.errors import DataError
from tests.conftest import Program
from tests.single.training.losses import save_arrays

OWN = "tests.single.training.losses"
COMMON = ("--batch-size", 13, "--epochs", 2, "--precision", "fp64", "--lr", 0.01)


def train(hvdtrain: Program, folder: Path, run: Path, model: str, *options: Any) -> dict[str, Any]:
    done = hvdtrain(
        *("train", "--model", f"{OWN}:{model}", "--data", folder, "--run", run, *COMMON, *options)
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary | {"printed": done.stdout}


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack images with three floating targets each."""
    folder = tmp_path_factory.mktemp("regression")
    save_arrays(folder / "means.npz")
    data.pack(folder / "means.npz", folder / "set", split="0.8,0.2")
    return folder / "set"


@pytest.mark.proves(
    "A regression on arrays of targets trains on one rank and on two with the same result, and "
    "reports what its loss measures."
)
def test_a_regression_on_one_rank_and_on_two(
    hvdtrain: Program, regression: Path, tmp_path: Path
) -> None:
    options = ("--loss", f"{OWN}:measured", "--holdout", 0.2)
    alone = train(hvdtrain, regression, tmp_path / "1", "model", *options)
    two = train(hvdtrain, regression, tmp_path / "2", "model", *options, "--ranks", 2, "--verify")
    final = alone["final"]
    assert final["test_accuracy"] is final["val_accuracy"] is None
    assert 0 < final["test_loss"] < final["test_worst"]
    assert (alone["best"]["metric"], alone["best"]["value"]) == ("val_loss", final["val_loss"])
    assert "test worst" in alone["printed"]
    assert "test acc" not in alone["printed"]
    for name in ("train_loss", "val_loss", "test_loss", "val_worst", "test_worst"):
        assert two["final"][name] == pytest.approx(final[name], rel=1e-9), name
    done = hvdtrain("evaluate", tmp_path / "1")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "evaluate counts classes" in done.stderr


def test_a_class_for_each_pixel(hvdtrain: Program, tmp_path: Path) -> None:
    masks = np.random.default_rng(1).integers(0, 3, (61, 8, 8), dtype=np.uint8)
    save_arrays(tmp_path / "masks.npz", masks)
    index = data.pack(tmp_path / "masks.npz", tmp_path / "set", split="0.8,0.2")
    assert str(index.targets) == "uint8 [8, 8]"
    assert index.classes == 3
    loss = ("--loss", "pixel-cross-entropy")
    run = train(hvdtrain, tmp_path / "set", tmp_path / "run", "pixels", *loss)
    assert 0 < run["final"]["test_accuracy"] < 1
    wrong = hvdtrain(
        *("train", "--model", f"{OWN}:pixels", "--data", tmp_path / "set", *loss),
        *("--augment", "crop-flip"),
    )
    assert wrong.returncode == 2
    assert "--augment crop-flip moves images but not their targets" in wrong.stderr


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_targets_that_are_no_labels_need_another_loss(
    hvdtrain: Program, regression: Path, tmp_path: Path, framework: str
) -> None:
    run = ("--data", regression, "--run", tmp_path / "run", "--framework", framework)
    done = hvdtrain("train", "--model", "cnn", *run)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "--loss cross-entropy needs class labels, and the data set has" in done.stderr


def test_targets_are_read_as_they_were_written(regression: Path) -> None:
    index = data.read_index(regression)
    assert (index.class_names, index.classes) == ((), 3)
    assert data.info(regression)["targets"] == "float32 [3]"
    for split in index.splits:
        for memory in (2**30, 1):
            with data.open_split(index, split, memory) as samples:
                rows = np.arange(len(samples))
                batch = samples.gather(rows)
                means = (batch.images.mean((1, 2)) / 255).astype(np.float32)
                assert np.array_equal(batch.labels, means)
                assert samples.labels(rows[:0]).shape == (0, 3)
    assert data.verify(regression) == []


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.full(61, np.nan), "the target of sample 0 is not finite"),
        (np.zeros((60, 2)), "are not the targets of 61 images"),
        (np.zeros((61, 2), np.uint64), "are not the targets of 61 images"),
    ],
)
def test_targets_that_cannot_be_packed(tmp_path: Path, targets: Any, message: str) -> None:
    save_arrays(tmp_path / "wrong.npz", targets)
    with pytest.raises(DataError, match=message):
        data.pack(tmp_path / "wrong.npz", tmp_path / "set", split="0.8,0.2")


def test_plan_check_takes_a_loss(hvdtrain: Program) -> None:
    done = hvdtrain(
        *("plan", "check", "--model", f"{OWN}:model", "--plan", "dp", "--ranks", 2),
        *("--loss", f"{OWN}:measured", "--image-size", 8, "--batch-size", 9, "--classes", 3),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "within the tolerance of 1e-12" in done.stdout
