"""The recipe of 94 %, whose functions lie beside its file, on a small set."""

import json
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import data
from tests.conftest import Program
from tests.single.training.jobs import summary_of
from tests.single.training.test_plans import assert_same_end

HERE = "tests.single.training.recipe"
RECIPE = Path(__file__).parents[3] / "recipes" / "cifar10-94.yaml"
SMALL = ("--precision", "fp64", "--batch-size", 21, "--epochs", 3, "--lr", 0.2, "--eval-every", 3)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "images"
    data.synth(folder, 117, 5, size=16, seed=1)
    return folder


def train(hvdtrain: Program, images: Path, run: Path, *options: Any) -> Any:
    ours = ("--config", RECIPE, "--data", images, "--run", run, "--batch-norm", "sync", *SMALL)
    return hvdtrain("train", *ours, *options)


@pytest.fixture(scope="module")
def serial(hvdtrain: Program, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("serial") / "run"
    done = train(hvdtrain, images, run)
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.parametrize(
    "options",
    [
        ("--ranks", 3, "--verify"),
        ("--ranks", 2, "--plan", "mp", "--expected", 1.0),
        ("--ranks", 4, "--plan", "hp:2x2"),
    ],
    ids=["replicas", "pipeline", "hybrid"],
)
def test_it_ends_on_several_ranks_where_it_ends_on_one(
    hvdtrain: Program, images: Path, tmp_path: Path, serial: Path, options: tuple[Any, ...]
) -> None:
    done = train(hvdtrain, images, tmp_path / "run", "--microbatches", 1, *options)
    assert done.returncode == 0, done.stderr
    assert_same_end(tmp_path / "run", serial, 1e-7)
    if "--expected" in options:
        assert "expected a test accuracy of 100.00%: NOT reached" in done.stdout


@pytest.mark.parametrize(
    "other",
    [
        ("--model", f"{HERE}:without_whitening"),
        ("--optimizer", f"{HERE}:without_lookahead"),
        ("--augment", f"{HERE}:other_moves"),
    ],
    ids=["whitening", "lookahead", "moves"],
)
def test_each_ingredient_changes_the_run(
    hvdtrain: Program, images: Path, tmp_path: Path, serial: Path, other: tuple[Any, ...]
) -> None:
    """The comparison above would not see an ingredient without effect."""
    done = train(hvdtrain, images, tmp_path / "run", *other, "--eval-every", 0)
    assert done.returncode == 0, done.stderr
    ours, theirs = (summary_of(run)["final"]["train_loss"] for run in (tmp_path / "run", serial))
    assert abs(ours - theirs) > 1e-5  # runs that should be equal agree to 1e-7


def test_it_resumes_to_the_bit_and_is_evaluated(
    hvdtrain: Program, images: Path, tmp_path: Path, serial: Path
) -> None:
    run = tmp_path / "run"
    fault = ("--inject", "kill step=16 rank=0", "--checkpoint-every", "7 steps")
    assert train(hvdtrain, images, run, *fault).returncode != 0
    done = train(hvdtrain, images, run, "--resume")
    assert done.returncode == 0, done.stderr
    assert "resumed after step " in done.stdout
    assert summary_of(run)["weights_sha256"] == summary_of(serial)["weights_sha256"]
    done = hvdtrain("evaluate", run, "--which", "last", "--to", tmp_path / "e")
    assert done.returncode == 0, done.stderr
    evaluation = json.loads((tmp_path / "e" / "evaluation.json").read_text())
    final = summary_of(run)["final"]
    assert evaluation["views"] == 6
    assert evaluation["accuracy"] == pytest.approx(final["test_accuracy"])
    assert evaluation["loss"] == pytest.approx(final["test_loss"], rel=1e-9)


def test_its_older_options_are_refused_in_one_line(
    hvdtrain: Program, images: Path, tmp_path: Path
) -> None:
    older = tmp_path / "older.yaml"
    older.write_text(f"model: cnn\ndata: {images}\nlr_start: 0.2\nwhiten: true\n")
    done = hvdtrain("train", "--config", older)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "lr_start is not an option of this version: give --optimizer, --lr" in done.stderr
