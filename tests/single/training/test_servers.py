"""Whole runs with parameter servers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.checkpoint import store
from tests.conftest import Program
from tests.single.training.jobs import summary_of

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
    servers = command(small_set, served, 4, "--sync", "server", "--servers", 2)
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
