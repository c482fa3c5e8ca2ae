"""Runs of two ranks that send compressed gradients, or compressed changes of weights."""

from pathlib import Path

import pytest

from tests.conftest import Program
from tests.single.training.jobs import summary_of


@pytest.mark.parametrize(
    ("sync", "compress", "stop"),
    # A run that ends inside a period would meet once more.
    [("exact", "powersgd:2", 3), ("local:2", "topk:0.1", 4), ("diloco:2", "powersgd:1", 4)],
)
def test_a_resumed_run_ends_with_the_same_weights(
    hvdtrain: Program, small_set: Path, tmp_path: Path, sync: str, compress: str, stop: int
) -> None:
    """The run stops after its first compressed step; residuals, factors and steps continue.

    Once, each rank took its residuals for those of another number of ranks.
    """
    common = ["train", "--model", "cnn", "--data", small_set, "--batch-size", 60, "--lr", 0.05]
    common += ["--sync", sync, "--compress", compress, "--compress-after", 2]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run, steps, more in ((whole, 6, []), (parts, stop, []), (parts, 6, ["--resume"])):
        done = hvdtrain(*common, "--ranks", 2, "--run", run, "--max-steps", steps, *more)
        assert done.returncode == 0, done.stderr
    summary = summary_of(whole)
    assert summary_of(parts)["weights_sha256"] == summary["weights_sha256"]
    assert summary["agreement"]["residual_norm"] > 0
    if sync != "exact":
        done = hvdtrain(*common, "--ranks", 1, "--run", parts, "--max-steps", 8, "--resume")
        assert done.returncode == 0, done.stderr
