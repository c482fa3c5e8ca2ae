"""A rank that hangs outside of its steps ends the job, which names it and its action."""

import signal
import time
from pathlib import Path

import psutil
import pytest

from hvdtrain.host import activity
from hvdtrain.host.activity import SAVE_FACTOR, START_FACTOR
from hvdtrain.launch import mpirun
from tests.conftest import Program
from tests.single.training import hangs

LIMIT = 4
OUTSIDE = activity.AFTER_THE_RANKS_SECONDS
SECONDS_TO_END = 60  # on a busy machine
MODEL = "tests.single.training.models:hangs_at"


def command(data: Path, run: Path, *options: object) -> list[object]:
    common = ["train", "--model", MODEL, "--data", data, "--run", run, "--ranks", 2]
    return [*common, "--stall-timeout", LIMIT, *options]


@pytest.mark.parametrize(
    ("rank", "where", "options", "action", "limit"),
    [
        (1, "loader", ("--epochs", 2), "reading its samples", LIMIT),
        pytest.param(
            *(1, "writing", ("--epochs", 100_000, "--checkpoint-every", "3 steps")),
            *("writing ", SAVE_FACTOR * LIMIT),  # the file, or waiting for it at the next save
            marks=pytest.mark.weekly,
        ),
        pytest.param(
            *(1, "after the last step", ("--max-steps", hangs.STEPS)),
            *("agreeing with all ranks on the last steps", LIMIT),
            marks=pytest.mark.weekly,
        ),
        pytest.param(
            *(0, "before the end", ("--max-steps", 3)),
            *("its own work after step 3, summing up the run", LIMIT + OUTSIDE),
            marks=pytest.mark.weekly,
        ),
        pytest.param(
            *(0, "stopped at exit", ("--max-steps", 3)),
            *("its own work after step 3, leaving with all ranks", LIMIT + OUTSIDE),
            marks=pytest.mark.weekly,
        ),
        pytest.param(
            *(0, "waiting at exit", ("--max-steps", 3)),
            *("its own work after step 3, leaving with all ranks", LIMIT + OUTSIDE),
            marks=pytest.mark.weekly,
        ),
    ],
)
def test_the_rank_is_named_with_what_it_does(
    hvdtrain: Program,
    small_set: Path,
    tmp_path: Path,
    rank: int,
    where: str,
    options: tuple[object, ...],
    action: str,
    limit: float,
) -> None:
    """Some hangs were not detected, and for others the waiting rank was blamed."""
    hung = tmp_path / "hung"
    done = hvdtrain(
        *command(small_set, tmp_path / "run", *options),
        FAULTY_RANKS=str(rank),
        HANGS_AT=where,
        HUNG=str(hung),
        timeout=200,
    )
    assert limit <= time.time() - hung.stat().st_mtime < limit + SECONDS_TO_END
    assert done.returncode == 4, done.stderr
    (line,) = done.stderr.splitlines()
    assert "has been stuck for longer than --stall-timeout allows, in " in line
    assert f"rank {rank} on " in line  # at the start, unless a waiting rank reported first
    assert action in line


@pytest.mark.weekly
def test_a_rank_that_cannot_read_its_part_of_a_checkpoint_is_named(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    steps = ("--checkpoint-every", "2 steps", "--max-steps")
    done = hvdtrain(*command(small_set, run, *steps, 4), FAULTY_RANKS="")
    assert done.returncode == 0, done.stderr
    again = command(small_set, run, *steps, 6, "--resume")
    hung, limit = tmp_path / "hung", START_FACTOR * LIMIT
    done = hvdtrain(*again, FAULTY_RANKS="0", HANGS_AT="restoring", HUNG=str(hung), timeout=200)
    assert limit <= time.time() - hung.stat().st_mtime < limit + SECONDS_TO_END
    assert done.returncode == 4, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("hvdtrain: rank 0 on ")
    assert "in reading a checkpoint" in line
    done = hvdtrain(*again, FAULTY_RANKS="")
    assert done.returncode == 0, done.stderr
    assert "resumed after step 4" in done.stdout


@pytest.mark.proves(
    "Under `srun` or another launcher a rank that is stopped is named and killed, which "
    "ends the job; a suspended job is not, and no process is left behind."
)
def test_a_rank_of_another_launcher_is_watched_from_outside(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """A stopped process has no working watchdog: a single one stayed until somebody killed it."""
    run, alerts = tmp_path / "run", tmp_path / "alerts"
    options = ("--model", "cnn", "--data", small_set, "--run", run, "--inject", "stop step=4")
    alert = f'echo "$HVDTRAIN_CAUSE: $HVDTRAIN_MESSAGE" >> {alerts}'
    done = hvdtrain(
        *("train", *options, "--stall-timeout", LIMIT, "--on-alert", alert),
        launcher=tuple(mpirun(1)),
        timeout=200,
    )
    assert done.returncode == 128 + signal.SIGKILL
    lines = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain: ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("hvdtrain: rank 0 on ")
    assert "in its own work after step 4, starting" in lines[0]
    assert alerts.read_text() == lines[0].replace("hvdtrain", "job failed") + "\n"
    assert monitors_of(run) == []


def monitors_of(run: Path) -> list[psutil.Process]:
    """Return the processes that watch the ranks of a run."""
    monitors = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "hvdtrain.health.monitor" in words and str(run) in words:
            monitors.append(process)
    return monitors
