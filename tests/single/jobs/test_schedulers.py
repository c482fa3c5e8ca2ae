"""The scripts for other schedulers, as programs with the variables that their scheduler sets."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, program_environment
from tests.single.training.jobs import events_of, summary_of

SCRIPTS = ROOT / "schedulers"
OPTIONS = "--model cnn --batch-size 10 --epochs 40 --log-every 1 --data"
# What the scheduler does about a job that has saved: an exit code, or a command that it gets.
FLUX = """#!/bin/bash
case $1 in
    resource) [[ $* == *ncores* ]] && echo 2 || echo 1 ;;
    *) echo "flux $*" >> "$CALLS" ;;
esac
"""
QSUB = '#!/bin/bash\necho "qsub $*" >> "$CALLS"\n'


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "variables", "code", "call"),
    [
        ("sge", {"NSLOTS": "2", "NHOSTS": "1", "JOB_ID": "7"}, 99, ""),
        ("lsf", {"LSB_DJOB_NUMPROC": "2", "LSB_HOSTS": "a a", "LSB_JOBID": "7"}, 75, ""),
        ("pbs", {"PBS_JOBID": "7.host"}, 75, "qsub -W depend=afterany:7.host -v ARGS,RUN,MPIRUN"),
        ("flux", {}, 75, "flux --parent batch -N 1 -n 2 schedulers/train.flux --model cnn"),
    ],
)
def test_a_job_that_is_warned_saves_and_starts_again(
    small_set: Path, tmp_path: Path, name: str, variables: dict[str, str], code: int, call: str
) -> None:
    (tmp_path / "schedulers").symlink_to(SCRIPTS)
    (tmp_path / "nodes").write_text("a\na\n")
    (tmp_path / "bin").mkdir()
    for program, text in (("flux", FLUX), ("qsub", QSUB)):
        (tmp_path / "bin" / program).write_text(text)
        (tmp_path / "bin" / program).chmod(0o755)
    run = tmp_path / "run"
    base = program_environment()
    environment = (
        base
        | variables
        | {
            "PATH": f"{tmp_path / 'bin'}{os.pathsep}{base['PATH']}",
            "CALLS": str(tmp_path / "calls"),
            "RUN": str(run),
            "ARGS": f"{OPTIONS} {small_set}",
            "PBS_O_WORKDIR": str(tmp_path),
            "PBS_NODEFILE": str(tmp_path / "nodes"),
        }
    )
    arguments = [] if name in ("lsf", "pbs") else [*OPTIONS.split(), str(small_set)]
    command = ["bash", f"schedulers/train.{name}", *arguments]

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
        )

    job = start()
    metrics = run / "metrics.jsonl"
    while job.poll() is None and not (metrics.exists() and len(events_of(run, "step")) > 3):
        time.sleep(0.1)
    job.send_signal(signal.SIGUSR1 if name == "sge" else signal.SIGUSR2)
    _, errors = job.communicate(timeout=120)
    assert job.returncode == code, errors
    assert f"{run} is saved but not done" in errors
    calls = tmp_path / "calls"
    assert call in (calls.read_text() if calls.exists() else "")
    job = start()
    _, errors = job.communicate(timeout=240)
    assert job.returncode == 0, errors
    assert summary_of(run)["epochs"] == 40
    assert summary_of(run)["ranks"] == 2
