"""Runs of two ranks that send compressed gradients."""

from pathlib import Path

import pytest

from tests.conftest import Program
from tests.single.training.jobs import summary_of


@pytest.mark.parametrize("compress", ["powersgd:2", "topk:0.1"])
def test_a_resumed_run_ends_with_the_same_weights(
    hvdtrain: Program, small_set: Path, tmp_path: Path, compress: str
) -> None:
    """The run stops after its first compressed step; residuals, factors and steps continue.

    Once, each rank took its residuals for those of another number of ranks.
    """
    common = ["train", "--model", "cnn", "--data", small_set, "--batch-size", 60, "--lr", 0.001]
    common += ["--compress", f"{compress},after=2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run, steps, more in ((whole, 6, []), (parts, 3, []), (parts, 6, ["--resume"])):
        done = hvdtrain(*common, "--ranks", 2, "--run", run, "--max-steps", steps, *more)
        assert done.returncode == 0, done.stderr
    summary = summary_of(whole)
    assert summary_of(parts)["weights_sha256"] == summary["weights_sha256"]
    assert summary["agreement"]["residual_norm"] > 0
