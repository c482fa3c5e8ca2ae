"""The ingredients of a recipe under every plan: whitening, lookahead, views."""

import json
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import data
from tests.conftest import Program
from tests.single.training.jobs import events_of, summary_of
from tests.single.training.test_plans import assert_same_end

INGREDIENTS = (
    *("--model", "airbench", "--precision", "fp64", "--batch-size", 21, "--epochs", 3),
    *("--optimizer", "sgd", "--lr", 0.05, "--momentum", 0.85, "--weight-decay", 0.1),
    *("--lr-schedule", "linear", "--warmup-epochs", 1, "--lr-end", 0.07),
    *("--lookahead", 4, "--label-smoothing", 0.2, "--whiten"),
    *("--augment", "crop-flip", "--shift", 2, "--border", "reflect", "--flip", "alternate"),
    *("--test-augment", "flip-shift", "--batch-norm", "sync", "--microbatches", 1),
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data set of 201 training images, since the network is wide: ten steps an epoch."""
    folder = tmp_path_factory.mktemp("data") / "images"
    data.synth(folder, 201, 5, size=16, seed=1)
    return folder


def train(hvdtrain: Program, images: Path, run: Path, *options: Any) -> Any:
    return hvdtrain("train", "--data", images, "--run", run, *INGREDIENTS, *options)


@pytest.fixture(scope="module")
def serial(hvdtrain: Program, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on one rank that reached what it should."""
    run = tmp_path_factory.mktemp("serial") / "run"
    done = train(hvdtrain, images, run, "--expected", 0.1)
    assert done.returncode == 0, done.stderr
    accuracy = summary_of(run)["final"]["test_accuracy"]
    assert f"expected a test accuracy of 10.00%: reached, it is {accuracy:.2%}" in done.stdout
    assert summary_of(run)["expectation"] == {"test_accuracy": 0.1, "is_reached": True}
    return run


@pytest.mark.parametrize(
    "options",
    [
        ("--ranks", 3, "--verify"),
        ("--ranks", 2, "--plan", "mp", "--expected", 1.0),
        ("--ranks", 4, "--plan", "hp:2x2"),
        ("--ranks", 2, "--shard-optimizer"),
    ],
    ids=["replicas", "pipeline", "hybrid", "sharded"],
)
def test_a_run_on_several_ranks_ends_where_the_serial_run_ends(
    hvdtrain: Program, images: Path, tmp_path: Path, serial: Path, options: tuple[Any, ...]
) -> None:
    done = train(hvdtrain, images, tmp_path / "run", *options)
    assert done.returncode == 0, done.stderr
    assert_same_end(tmp_path / "run", serial, 1e-7)
    if "--expected" in options:
        assert "expected a test accuracy of 100.00%: NOT reached" in done.stdout


@pytest.mark.parametrize(
    "other",
    [
        ("--no-whiten",),
        ("--lookahead", 5),
        ("--flip", "random"),
        ("--border", "zeros"),
    ],
    ids=lambda other: other[0],
)
def test_each_ingredient_changes_the_run(
    hvdtrain: Program, images: Path, tmp_path: Path, serial: Path, other: tuple[Any, ...]
) -> None:
    """The comparison above would not see an option that nobody reads."""
    done = train(hvdtrain, images, tmp_path / "run", *other, "--eval-every", 0)
    assert done.returncode == 0, done.stderr
    ours, theirs = (summary_of(run)["final"]["train_loss"] for run in (tmp_path / "run", serial))
    assert abs(ours - theirs) > 1e-5  # runs that should be equal agree to 1e-7


def test_a_run_that_was_killed_ends_with_the_same_weights(
    hvdtrain: Program, images: Path, tmp_path: Path, serial: Path
) -> None:
    run = tmp_path / "run"
    fault = ("--inject", "kill step=26 rank=0", "--checkpoint-every", "7 steps")
    assert train(hvdtrain, images, run, *fault).returncode != 0
    done = train(hvdtrain, images, run, "--resume")
    assert done.returncode == 0, done.stderr
    assert "resumed after step " in done.stdout  # 20 or 21: checkpoints are written beside steps
    assert summary_of(run)["weights_sha256"] == summary_of(serial)["weights_sha256"]
    refused = train(hvdtrain, images, run, "--resume", "--epochs", 4)
    assert refused.returncode == 2
    assert "epochs was 3, is 4" in refused.stderr


def test_slow_weights_follow_other_ranks_and_plans(
    hvdtrain: Program, images: Path, tmp_path: Path, serial: Path
) -> None:
    """A sharded run is killed and resumed on other ranks, whose plan changes during the run."""
    run = tmp_path / "run"
    sharded = ("--ranks", 2, "--shard-optimizer", "--checkpoint-every", "7 steps")
    done = train(hvdtrain, images, run, *sharded, "--inject", "kill step=16 rank=1")
    assert done.returncode != 0
    others = ("--ranks", 2, "--plan", "adaptive", "--inject", "replan step=20", "--resume")
    done = train(hvdtrain, images, run, *others)
    assert done.returncode == 0, done.stderr
    assert len(events_of(run, "plan")) > 2, "the plan changed"
    assert_same_end(run, serial, 1e-7)


def test_evaluate_sees_what_the_run_saw(hvdtrain: Program, tmp_path: Path, serial: Path) -> None:
    done = hvdtrain("evaluate", serial, "--which", "last", "--to", tmp_path / "e")
    assert done.returncode == 0, done.stderr
    evaluation = json.loads((tmp_path / "e" / "evaluation.json").read_text())
    final = summary_of(serial)["final"]
    assert evaluation["accuracy"] == pytest.approx(final["test_accuracy"])
    assert evaluation["loss"] == pytest.approx(final["test_loss"], rel=1e-9)
