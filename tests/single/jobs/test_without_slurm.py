"""`hvdtrain jobs` where there is no Slurm."""

import sys
from pathlib import Path

import pytest

from tests.conftest import Program


@pytest.mark.parametrize("command", ["submit", "sweep"])
def test_a_missing_slurm_is_said_in_one_line(
    hvdtrain: Program, small_set: Path, tmp_path: Path, command: str
) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(f"model: cnn\ndata: {small_set}\n")
    options = {
        "submit": ("--model", "cnn", "--data", small_set, "--run", tmp_path / "run"),
        "sweep": (study, "--to", tmp_path / "runs"),
    }
    # A PATH without Slurm's commands, which this machine may have.
    done = hvdtrain("jobs", command, *options[command], PATH=str(Path(sys.executable).parent))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("hvdtrain: there is no Slurm here (sinfo is not in PATH)")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "runs").exists()


def test_runs_without_jobs_are_said_in_one_line(hvdtrain: Program, tmp_path: Path) -> None:
    for command in ("status", "cancel"):
        done = hvdtrain("jobs", command, tmp_path)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert f"{tmp_path} holds no run with a job: start a job with" in done.stderr
