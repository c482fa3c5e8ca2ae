"""The launcher's handling of starts without progress, and of ranks that hang."""

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from hvdtrain import cli
from hvdtrain.training import starts
from tests import warm
from tests.conftest import Program
from tests.single.training.jobs import (
    SOON_SECONDS,
    begin,
    events_of,
    ranks_of,
    resume,
    suspend,
    wait_for,
)


def test_starts_that_save_nothing_come_to_an_end(
    small_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Once, restarts were used up within seconds, and a long message ended the launcher."""
    monkeypatch.setattr(starts, "FIRST_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(sys, "executable", warm.python())
    monkeypatch.setenv("FAULTY_RANKS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alerts = tmp_path / "alerts"
    options = ["--model", "tests.single.training.models:raises_much", "--data", str(small_set)]
    options += ["--ranks", "2", "--restarts", "9", "--run", str(tmp_path / "run")]
    code = cli.run(["train", *options, "--on-alert", f"echo $HVDTRAIN_CAUSE >> {alerts}"])
    assert code == 4
    lines = [line for line in capfd.readouterr().err.splitlines() if "hvdtrain: " in line]
    waits = [
        line.partition(" in ")[2].partition(",")[0] for line in lines if "restarting on" in line
    ]
    assert waits == ["0 s", "1 s"]
    message = "hvdtrain: not restarted: 3 starts in a row saved no new checkpoint; the last one: "
    assert lines[-1].startswith(f"{message}rank 1 on ")
    assert "RuntimeError: this rank is at fault" in lines[-1]
    assert len(lines[-1]) < 400
    assert alerts.read_text().splitlines() == ["rank failed"] * 3


def test_a_rank_that_hangs_before_the_first_step_ends_the_job(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """Once, nothing watched the set-up: the job hung until its time limit."""
    options = ["--model", "tests.single.training.models:hangs", "--data", small_set]
    options += ["--ranks", 2, "--stall-timeout", 1, "--run", tmp_path / "run"]
    done = hvdtrain("train", *options, FAULTY_RANKS="1", timeout=SOON_SECONDS)
    assert done.returncode == 4, done.stderr
    (line,) = done.stderr.splitlines()
    assert "has been stuck for longer than --stall-timeout allows, in its start-up" in line


def test_a_job_that_is_suspended_resumes(small_set: Path, tmp_path: Path) -> None:
    """Once, ranks reported a stall after SIGSTOP and SIGCONT, which `scontrol suspend` sends."""
    run, limit = tmp_path / "run", 3.0
    options = ["train", "--model", "cnn", "--data", str(small_set), "--ranks", "2", "--run"]
    options += [str(run), "--epochs", "100000", "--log-every", "1", "--stall-timeout", str(limit)]

    def steps() -> int:
        return len(events_of(run, "step")) if (run / "metrics.jsonl").exists() else 0

    process = begin(options, steps)
    job = [warm.fork_of(psutil.Process(process.pid)), *ranks_of(process)]
    suspend(job)
    done = steps()
    time.sleep(2 * limit)  # the fault itself: longer than an action may take
    resume(job)
    wait_for(process, lambda: steps() > done + 2)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=SOON_SECONDS)[1]
    assert process.returncode == 75, errors
