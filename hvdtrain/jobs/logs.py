"""What a rank has printed, now or as it comes."""

import sys
import time
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.jobs import record, watch
from hvdtrain.jobs.record import Record

POLL_SECONDS = 1.0
ASK_SECONDS = 15.0  # Slurm is asked for the state of a job so often


def show(run: str, rank: int, follow: bool) -> None:
    """Print standard output and standard error of a rank of the job that runs, or ran last.

    With `follow`, until that job is over; one that waits is waited for.

    Raises:
        UsageError: if the run has no job, or the job no such rank.
    """
    folder = Path(run)
    kept = record.read(folder)
    if kept is None:
        raise UsageError(f"{run}: no job was made for it; hvdtrain jobs submit does")
    if not 0 <= rank < kept.ranks:
        raise UsageError(f"--rank {rank}: the run has ranks 0 to {kept.ranks - 1}")
    rank = rank if kept.cluster == "slurm" else 0  # there a single task starts all ranks
    job = _shown(folder, kept, rank)
    if not follow and not watch.log_files(kept, job, rank):
        raise UsageError(f"job {job} has not printed anything yet: is it still waiting?")
    read: dict[Path, int] = {}
    asked, is_over = 0.0, not follow
    while True:
        if follow and time.monotonic() - asked > ASK_SECONDS:
            asked, is_over = time.monotonic(), _is_over(folder, kept, job)
        for path in watch.log_files(kept, job, rank):
            read[path] = _print_from(path, read.get(path, 0))
        if is_over:
            return
        time.sleep(POLL_SECONDS)


def _shown(run: Path, kept: Record, rank: int) -> str:
    """The job that runs, else the first that waits, else the newest that has printed anything."""
    (own,) = watch.states([(run, kept)])
    running = [job for job in kept.jobs if job in own and own[job].state == "RUNNING"]
    waiting = [job for job in kept.jobs if job in own and own[job].is_active]
    printed = [job for job in kept.jobs if watch.log_files(kept, job, rank)]
    return (running or waiting or printed[::-1] or kept.jobs[::-1])[0]


def _is_over(run: Path, kept: Record, job: str) -> bool:
    (own,) = watch.states([(run, kept)])
    state = own.get(job)
    return state is None or not state.is_active


def _print_from(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read()
    target = sys.stderr if path.suffix == ".err" else sys.stdout
    target.write(content.decode(errors="replace"))
    target.flush()
    return offset + len(content)
