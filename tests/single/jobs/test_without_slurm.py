"""`hvdtrain jobs` on a machine without Slurm."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import psutil
import pytest

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.jobs import submit, watch
from hvdtrain.jobs.options import JobOptions, Site
from hvdtrain.jobs.slurm import Request
from tests.conftest import Program, program, program_environment
from tests.single.training.jobs import changeable_by_others, summary_of, umask


@pytest.mark.proves("No other user can change what a job executes, whatever the umask.")
def test_no_other_user_can_change_what_a_job_executes(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """Under umask 002 the group could replace a pickle, and so run a program as the user."""
    runs = tmp_path / "runs"
    options = ("--model", "cnn", "--data", small_set, "--max-steps", 1, "--cluster", "local")
    with umask(0o002):
        done = hvdtrain("jobs", "submit", *options, "--run", runs / "run", "--on-alert", "true")
    assert done.returncode == 0, done.stderr
    (number,) = json.loads((runs / "run" / "job.json").read_text())["jobs"]
    until = time.monotonic() + 120
    while not (runs / "run" / "summary.json").exists() or psutil.pid_exists(int(number)):
        assert time.monotonic() < until, hvdtrain("jobs", "logs", runs / "run")
        time.sleep(0.1)
    assert summary_of(runs / "run")["steps"] == 1
    assert changeable_by_others(runs) == []
    assert list(runs.rglob("*.pkl")) == []


@pytest.mark.parametrize("name", ["run", "run/logs"])
def test_a_folder_that_others_may_change_is_refused(
    hvdtrain: Program, small_set: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / name).chmod(0o775)
    options = ("--model", "cnn", "--data", small_set, "--cluster", "local")
    done = hvdtrain("jobs", "submit", *options, "--run", tmp_path / "run")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"{tmp_path / name} can be changed by other users" in line
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize("cluster", ["slurm", "local"])
@pytest.mark.parametrize("name", ["a%tb", "%j", "a\\b"])
def test_names_that_would_be_replaced_are_refused(
    small_set: Path, tmp_path: Path, name: str, cluster: Literal["slurm", "local"]
) -> None:
    """All ranks wrote into the same file, or into one that `jobs logs` does not find."""
    run = tmp_path / name
    training = TrainConfig(model="cnn", data=str(small_set), run=str(run))
    request = Request(
        runs=(training,),
        job=JobOptions(cluster=cluster),
        site=Site(),
        logs=run / "logs",
        name="run",
    )
    with pytest.raises(UsageError, match="Slurm and submitit replace") as caught:
        submit.check([request])
    assert len(str(caught.value).splitlines()) == 1


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
    # A PATH without Slurm's commands, as this machine may have Slurm.
    done = hvdtrain("jobs", command, *options[command], PATH=str(Path(sys.executable).parent))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("hvdtrain: Slurm is not available (sinfo is not in PATH)")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "runs").exists()


def test_runs_without_jobs_are_said_in_one_line(hvdtrain: Program, tmp_path: Path) -> None:
    for command in ("status", "cancel"):
        done = hvdtrain("jobs", command, tmp_path)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert f"{tmp_path} holds no run with a job: start a job with" in done.stderr


@pytest.mark.proves(
    "Two submissions of a run at once make one job, and a Ctrl-C loses the number of none."
)
def test_two_submissions_of_one_run_at_once_make_one_job(small_set: Path, tmp_path: Path) -> None:
    """After a double click, or in two terminals, both saw no job, and each submitted one."""
    run = tmp_path / "run"
    words = ["jobs", "submit", "--cluster", "local", "--model", "cnn", "--data", str(small_set)]
    command = program(*words, "--max-steps", 1, "--run", run)
    both = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=program_environment()
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    (number,) = {job for text in outputs for job in re.findall(r"is job (\d+)", text)}
    assert sorted(" already, as it was submitted" in text for text in outputs) == [False, True]
    job_record = watch.read(run)
    assert job_record is not None
    assert job_record.jobs == (number,)
    assert not list(tmp_path.glob(".*"))
    while watch.active([run])[run]:
        time.sleep(0.1)
    assert summary_of(run)["steps"] == 1
