"""Ending the jobs of runs."""

import signal
import socket
from collections.abc import Iterable
from contextlib import suppress

import psutil

from hvdtrain.errors import UsageError
from hvdtrain.jobs import slurm, watch


def cancel(runs: Iterable[str]) -> list[str]:
    """End what waits or runs of these runs; a line for each job.

    Raises:
        UsageError: if there is no such run, or Slurm refuses.
        DataError: if a record cannot be understood.
    """
    said = []
    queued: list[str] = []
    processes: set[int] = set()  # one process makes the runs of a study without Slurm
    found = watch.runs_of(runs)
    for (run, kept), own in zip(found, watch.states(found), strict=True):
        active = [job for job, state in own.items() if state.is_active]
        if kept.cluster == "slurm":
            queued += active
        elif kept.host == socket.gethostname():
            processes |= set(map(int, active))
        elif active:
            raise UsageError(f"{run} runs on {kept.host}: cancel it there")
        said += [f"{run}: job {job} cancelled" for job in active]
        if not active:
            said.append(f"{run}: no job of it waits or runs")
    if queued:
        slurm.cancel(queued)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(process).send_signal(signal.SIGINT)
    return said
