"""Whole runs with parameter servers."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.checkpoint import store
from tests.conftest import Program
from tests.single.training.jobs import (
    assert_each_sample_once,
    events_of,
    ranks_of,
    start,
    summary_of,
    wait_for,
)

SECONDS_TO_END = 15.0


def command(data: Path, run: Path, ranks: int, *more: object) -> list[object]:
    words: list[object] = ["train", "--model", "cnn", "--data", data, "--precision", "fp64"]
    words += ["--batch-size", 50, "--epochs", 2, "--lr", 0.003, "--ranks", ranks, "--run", run]
    return [*words, *more]


def weights_of(run: Path) -> dict[str, np.ndarray]:
    newest: Any = store.load_newest(run / "checkpoints")[0]
    tensors: dict[str, np.ndarray] = newest.tensors
    return tensors


def test_a_run_with_servers_is_the_exact_run_and_resumes_as_such(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    exact, served = tmp_path / "exact", tmp_path / "served"
    done = hvdtrain(*command(small_set, exact, 2, "--reduce-with", "mpi"))
    assert done.returncode == 0, done.stderr
    servers = command(small_set, served, 4, "--sync", "server,servers=2")
    done = hvdtrain(*servers, "--checkpoint-every", "5 steps", "--max-steps", 8)
    assert done.returncode == 0, done.stderr
    assert "2 rank(s) train; ranks 2 to 3 hold the weights" in done.stdout
    done = hvdtrain(*command(small_set, served, 3, "--sync", "server", "--resume"))
    assert done.returncode == 0, done.stderr
    assert "resumed after step 8" in done.stdout
    expected, actual = weights_of(exact), weights_of(served)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert np.allclose(actual[name], value, rtol=0, atol=1e-10), name
    summary = summary_of(served)
    assert summary["ranks"] == 3
    assert summary["plan"]["stages"][0]["ranks"] == [0, 1]
    assert summary["final"]["test_accuracy"] == summary_of(exact)["final"]["test_accuracy"]
    agreement = summary["agreement"]
    held = 8 * sum(value.size for value in expected.values())
    # Two workers send their gradients, and a server sends its weights to each of them. An epoch
    # ends with one sample, and so with one worker that has no gradients.
    assert agreement["sent_bytes_per_step"] == pytest.approx((4 * 18 - 2) * held / 18 / 3)
    assert agreement["sync"] == "server"


@pytest.mark.parametrize("sync", ["server:stale=2", "server:async"])
def test_workers_that_run_ahead_make_the_same_number_of_steps(
    hvdtrain: Program, small_set: Path, tmp_path: Path, sync: str
) -> None:
    run, ledger = tmp_path / "run", tmp_path / "ledger.csv"
    slow = "slow step=2 rank=1 seconds=0.02 steps=20"
    more = ("--sync", sync, "--checkpoint-every", "7 steps", "--log-every", 1, "--epochs", 6)
    faults = ("--inject", slow, "--ledger", ledger)
    done = hvdtrain(*command(small_set, run, 3, *more, *faults))
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in events_of(run, "step")] == list(range(1, 79))
    summary = summary_of(run)
    agreement = summary["agreement"]
    assert 0 < agreement["mean_staleness"] <= agreement["max_staleness"]
    assert agreement["max_staleness"] <= (2 if sync == "server:stale=2" else 32)
    # Without learning it is log 5 = 1.61. Without a bound a busy machine may make the weights of a
    # worker so old that these few steps learn nothing; they must not diverge.
    assert summary["final"]["test_loss"] < (1.5 if sync == "server:stale=2" else 2.0)
    assert_each_sample_once(ledger, 6)
    again = ("--resume", "--epochs", 7, "--sync", sync, "--ledger", ledger)
    done = hvdtrain(*command(small_set, run, 2, *again))
    assert done.returncode == 0, done.stderr
    assert_each_sample_once(ledger, 7)


@pytest.mark.weekly
@pytest.mark.parametrize("sync", ["server", "server:stale=2", "server:async"])
@pytest.mark.parametrize("rank", [1, 2], ids=["worker", "server"])
def test_a_killed_rank_ends_the_run_soon_and_is_named(
    small_set: Path, tmp_path: Path, sync: str, rank: int
) -> None:
    more = ("--sync", sync, "--epochs", 10000, "--inject", f"kill step=20 rank={rank}")
    words = command(small_set, tmp_path / "run", 3, *more)
    process = start([str(word) for word in words])
    wait_for(process, lambda: len(ranks_of(process)) == 3)
    wait_for(process, lambda: len(ranks_of(process)) < 3)
    _, errors = process.communicate(timeout=SECONDS_TO_END)
    assert process.returncode != 0
    assert re.search(rf"rank {rank} on \S+ was ended by signal 9", errors), errors


@pytest.mark.weekly
@pytest.mark.parametrize("sync", ["server", "server:stale=2", "server:async"])
def test_a_run_that_loses_a_worker_goes_on_with_fewer(
    hvdtrain: Program, small_set: Path, tmp_path: Path, sync: str
) -> None:
    run, ledger = tmp_path / "run", tmp_path / "ledger.csv"
    more = ("--sync", sync, "--checkpoint-every", "3 steps", "--ledger", ledger, "--epochs", 3)
    faults = ("--restarts", "1,min-ranks=3", "--inject", "kill step=20 rank=1")
    done = hvdtrain(*command(small_set, run, 4, *more, *faults))
    assert done.returncode == 0, done.stderr
    assert "was ended by signal 9" in done.stderr
    assert_each_sample_once(ledger, 3)
