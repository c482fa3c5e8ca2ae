"""A user's script that trains from Python on several ranks."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from hvdtrain.errors import RankError
from hvdtrain.launch import mpirun
from tests import warm
from tests.conftest import ROOT, program_environment
from tests.single.api import two_ranks

SCRIPT = Path(two_ranks.__file__)


def test_runs_in_one_process_agree_and_a_failing_callback_ends_all_ranks(
    small_set: Path, tmp_path: Path
) -> None:
    # Horovod 0.28 crashed when a second run in the same process started it again.
    done = subprocess.run(
        [*mpirun(2), warm.python(), str(SCRIPT), str(small_set), str(tmp_path)],
        cwd=ROOT,
        env=program_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["is_within"]
    assert results["steps"] > 0
    losses = results["losses"]
    assert losses["dp"] == pytest.approx(losses["mp"], rel=1e-9)
    assert losses["dp"] == pytest.approx(alone(small_set, tmp_path), rel=1e-9)
    assert done.returncode == RankError.exit_code
    assert "hvdtrain: rank 0 on" in done.stderr
    assert f'{SCRIPT}", line ' in done.stderr  # the user's own line
    assert "ZeroDivisionError: no tracker on rank 0" in done.stderr
    assert "in on_epoch of the callback Fails" in done.stderr
    assert "no tracker on rank 1" not in done.stderr
    assert "cannot continue alone" not in done.stdout


def alone(small_set: Path, tmp_path: Path) -> float:
    """Return the loss of the same run by built-in functions on one rank, from equal weights."""
    torch.manual_seed(0)
    result = two_ranks.train(
        two_ranks.TrainConfig(
            model=two_ranks.network(),
            data=str(small_set),
            epochs=1,
            precision="fp64",
            optimizer="sgd",
            lr=0.05,
            run=str(tmp_path / "alone"),
        )
    )
    loss: float = result["final"]["test_loss"]
    return loss
