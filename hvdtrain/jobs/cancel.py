"""Cancel the jobs of runs."""

import signal
import socket
from collections.abc import Iterable
from contextlib import suppress

import psutil

from hvdtrain.errors import UsageError
from hvdtrain.jobs import slurm, watch


def cancel(runs: Iterable[str]) -> list[str]:
    """Cancel all waiting and running jobs of these runs; return one line per job.

    Raises:
        UsageError: if there is no such run, or Slurm refuses.
        DataError: if a job record cannot be parsed.
    """
    lines = []
    queued: list[str] = []
    processes: set[int] = set()  # without Slurm one process makes all runs of a study
    run_records = watch.runs_of(runs)
    for (run, job_record), states in zip(run_records, watch.states(run_records), strict=True):
        active = [job for job, state in states.items() if state.is_active]
        if job_record.cluster == "slurm":
            queued += active
        elif job_record.host == socket.gethostname():
            processes |= set(map(int, active))
        elif active:
            raise UsageError(f"{run} runs on {job_record.host}: cancel it there")
        lines += [f"{run}: job {job} cancelled" for job in active]
        if not active:
            lines.append(f"{run}: no job is waiting or running")
    if queued:
        slurm.cancel(queued)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(process).send_signal(signal.SIGINT)
    return lines
