"""Runs with local steps, stopped inside a period, end as if nothing had happened."""

import functools
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.checkpoint import store
from hvdtrain.errors import Preempted
from tests.conftest import Program
from tests.single.training.jobs import begin, saves, summary_of

METHODS = {
    "local": ("--sync", "local:3"),
    "diloco": ("--sync", "diloco:4"),
    "elastic": ("--sync", "elastic:3"),
}


def command(method: str, data: Path, run: Path, *options: object) -> list[str]:
    words = ["train", "--model", "cnn", "--data", data, "--ranks", 2, "--run", run]
    words += ["--batch-size", 60, "--optimizer", "sgd", "--lr", 0.02, "--max-steps", 21]
    return [str(word) for word in (*words, *METHODS[method], *options)]


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, hvdtrain: Program, small_set: Path
) -> Callable[[str], str]:
    """Return the hash of the weights that a method ends with."""

    @functools.cache
    def find(method: str) -> str:
        run = tmp_path_factory.mktemp("undisturbed") / method
        done = hvdtrain(*command(method, small_set, run))
        assert done.returncode == 0, done.stderr
        assert summary_of(run)["agreement"]["meetings"] >= 5
        return str(summary_of(run)["weights_sha256"])

    return find


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_is_killed_inside_a_period_ends_with_the_same_weights(
    hvdtrain: Program,
    small_set: Path,
    tmp_path: Path,
    undisturbed: Callable[[str], str],
    method: str,
) -> None:
    run = tmp_path / "run"
    # After steps 5, 10 and 15 (the fourth of the second epoch) a period is under way. The replicas
    # do not wait for each other, so the rank that dies is the slow one; still, a busy machine may
    # not have written the last checkpoint.
    faults = "slow step=16 seconds=0.3 steps=4 rank=1; kill step=20 rank=1"
    options = ("--checkpoint-every", "5 steps", "--inject", faults)
    done = hvdtrain(*command(method, small_set, run, *options, "--restarts", 1))
    assert done.returncode == 0, done.stderr
    (step,) = re.findall(r"resumed after step (\d+)", done.stdout)
    assert step in ("5", "10", "15")
    assert summary_of(run)["weights_sha256"] == undisturbed(method)


def test_a_signal_inside_a_period_forces_no_meeting(
    small_set: Path, tmp_path: Path, hvdtrain: Program, undisturbed: Callable[[str], str]
) -> None:
    run = tmp_path / "run"
    slow = ("--checkpoint-every", "2 steps", "--inject", "slow step=3 seconds=0.3 steps=8 rank=0")
    process = begin(command("local", small_set, run, *slow), lambda: saves(run))
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == Preempted.exit_code, errors
    newest = store.load(store.stored(run / "checkpoints")[-1])
    assert 2 <= newest.progress["step"] < 11
    done = hvdtrain(*command("local", small_set, run, "--resume"))
    assert done.returncode == 0, done.stderr
    assert summary_of(run)["weights_sha256"] == undisturbed("local")
