"""Print the output of a rank, once or continuously."""

import sys
import time
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.jobs import record, watch
from hvdtrain.jobs.record import Record

POLL_SECONDS = 1.0
STATE_POLL_SECONDS = 15.0  # between two queries of the job's state


def show(run: str, rank: int, follow: bool) -> None:
    """Print standard output and standard error of a rank of the running or newest job.

    With `follow`, continue until that job has ended; wait if the job has not started yet.

    Raises:
        UsageError: if the run has no job, or the job no such rank.
    """
    folder = Path(run)
    job_record = record.read(folder)
    if job_record is None:
        raise UsageError(f"{run} has no job: start one with hvdtrain jobs submit")
    if not 0 <= rank < job_record.ranks:
        raise UsageError(f"--rank {rank} does not exist: give 0 to {job_record.ranks - 1}")
    rank = rank if job_record.cluster == "slurm" else 0  # locally one task starts all ranks
    job = _job_to_show(folder, job_record, rank)
    if not follow and not watch.log_files(job_record, job, rank):
        raise UsageError(f"job {job} has printed nothing yet: wait for it with --follow")
    offsets: dict[Path, int] = {}
    last_query, is_over = 0.0, not follow
    while True:
        if follow and time.monotonic() - last_query > STATE_POLL_SECONDS:
            last_query, is_over = time.monotonic(), _is_over(folder, job_record, job)
        for path in watch.log_files(job_record, job, rank):
            offsets[path] = _print_from(path, offsets.get(path, 0))
        if is_over:
            return
        time.sleep(POLL_SECONDS)


def _job_to_show(run: Path, job_record: Record, rank: int) -> str:
    """Return the running job, else the first waiting one, else the newest that has output."""
    (states,) = watch.states([(run, job_record)])
    jobs = job_record.jobs
    running = [job for job in jobs if job in states and states[job].state == "RUNNING"]
    waiting = [job for job in jobs if job in states and states[job].is_active]
    printed = [job for job in jobs if watch.log_files(job_record, job, rank)]
    return (running or waiting or printed[::-1] or jobs[::-1])[0]


def _is_over(run: Path, job_record: Record, job: str) -> bool:
    (states,) = watch.states([(run, job_record)])
    state = states.get(job)
    return state is None or not state.is_active


def _print_from(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read()
    target = sys.stderr if path.suffix == ".err" else sys.stdout
    target.write(content.decode(errors="replace"))
    target.flush()
    return offset + len(content)
