"""The default run folder, which is the same for the same run, and the check of a run."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError, UsageError
from hvdtrain.jobs.submit import check_runs, run_folder


def folder(**values: Any) -> str:
    return str(run_folder(TrainConfig(model="cnn", data="d", epochs=3, ranks=2, **values)))


def test_options_with_their_defaults_make_no_other_one() -> None:
    """A run keeps its folder when a version adds or removes an option that it does not use."""
    assert (
        folder() == folder(lr=TrainConfig.lr, compile=False, sync="exact") == "runs/cnn-2-20ddd602"
    )


@pytest.mark.parametrize(
    "values",
    [
        {"eval_every": 3},
        {"log_every": 1},
        {"verify": True},
        {"resume": "auto"},
        {"expected": 0.9},
    ],
)
def test_how_often_a_run_is_looked_at_makes_no_other_one(values: dict[str, Any]) -> None:
    """A second submission, with another --eval-every, started the run over in another folder."""
    assert folder(**values) == folder()


@pytest.mark.parametrize(
    "values", [{"lr": 0.5}, {"seed": 1}, {"weight_decay": 0.1}, {"clip_norm": 2.0}]
)
def test_what_is_computed_does(values: dict[str, Any]) -> None:
    assert folder(**values) != folder()


def test_what_is_wrong_comes_back_from_the_process_that_checks(tmp_path: Path) -> None:
    good = TrainConfig(model="cnn", data=str(tmp_path))
    with pytest.raises(DataError, match=f"^{tmp_path}: .*hvdtrain data pack"):
        check_runs([good])
    with pytest.raises(UsageError, match="unknown model 'cnm'"):
        check_runs([TrainConfig(model="cnm", data=str(tmp_path))])


def test_the_process_that_submits_loads_no_torch() -> None:
    program = "import sys; from hvdtrain.jobs import submit, sweep; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"torch", "h5py", "matplotlib"} & set(done.stdout.split())
