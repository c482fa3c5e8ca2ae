"""A last batch that a component cannot take is refused before the first step of the run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.training.starts import check_before_submission
from tests.conftest import Program
from tests.single.training.jobs import summary_of

MODELS = "tests.single.training.models"


def command(data: Path, run: Path, *options: Any) -> tuple[Any, ...]:
    return ("train", "--data", data, "--run", run, "--epochs", 1, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # 601 images: the last batch has one.
        (
            ("--model", f"{MODELS}:normed", "--batch-size", 100),
            "component 'head' cannot take 1 sample at once, its part of a batch of 1, the last of "
            "an epoch (ValueError: Expected more than 1 value",
        ),
        (
            ("--model", f"{MODELS}:flattens", "--batch-size", 100, "--ranks", 2)
            + ("--batch-norm", "sync"),
            "component 'flat' cannot take 0 samples at once",
        ),
        (
            ("--model", f"{MODELS}:normed", "--batch-size", 100, "--ranks", 2)
            + ("--batch-norm", "sync"),
            "component 'head' cannot take 1 sample at once, its part of a batch of 1, the last",
        ),
        (
            ("--model", f"{MODELS}:normed", "--batch-size", 100, "--ranks", 2)
            + ("--batch-norm", "sync", "--plan", "mp"),
            "component 'head' cannot take 1 sample at once, its part of a batch of 1, the last",
        ),
        (
            ("--model", f"{MODELS}:normed", "--batch-size", 7, "--microbatches", 4),
            "component 'head' cannot take 1 sample at once, its part of a batch of 7 (ValueError",
        ),
    ],
)
def test_it_is_refused_in_one_line(
    hvdtrain: Program, small_set: Path, tmp_path: Path, options: tuple[Any, ...], message: str
) -> None:
    done = hvdtrain(*command(small_set, tmp_path / "run", *options))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.endswith("give another --batch-size, or fewer --microbatches or --ranks\n")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model", ["normed", "cumulative"])
def test_it_is_refused_before_it_waits_in_a_queue(small_set: Path, model: str) -> None:
    config = TrainConfig(model=f"{MODELS}:{model}", data=str(small_set), batch_size=100)
    with pytest.raises(UsageError, match="cannot take 1 sample at once, its part of a batch of 1"):
        check_before_submission([config])
    check_before_submission([replace(config, holdout=0.1)])  # 541 images


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (("--model", f"{MODELS}:normed", "--batch-size", 100, "--max-steps", 6), 6),
        (
            ("--model", f"{MODELS}:flattens", "--batch-size", 100, "--ranks", 2)
            + ("--batch-norm", "local"),
            7,
        ),
        (
            ("--model", f"{MODELS}:flattens", "--batch-size", 101, "--ranks", 2)
            + ("--batch-norm", "sync"),
            6,
        ),
        (
            ("--model", f"{MODELS}:flattens_alone", "--batch-size", 100, "--ranks", 2)
            + ("--batch-norm", "sync"),
            7,
        ),
        (("--model", f"{MODELS}:frozen_norm", "--batch-size", 100), 7),
    ],
    ids=[
        *("the tail is never reached", "an empty replica does nothing", "no replica is empty"),
        *("nothing is synchronised", "its batch norm is frozen"),
    ],
)
def test_what_can_be_runs(
    hvdtrain: Program, small_set: Path, tmp_path: Path, options: tuple[Any, ...], steps: int
) -> None:
    done = hvdtrain(*command(small_set, tmp_path / "run", *options))
    assert done.returncode == 0, done.stderr
    assert summary_of(tmp_path / "run")["steps"] == steps
