"""Ending the jobs of runs."""

import signal
from collections.abc import Iterable

import psutil

from hvdtrain.jobs import slurm, watch


def cancel(runs: Iterable[str]) -> list[str]:
    """End what waits or runs of these runs; a line for each job.

    Raises:
        UsageError: if there is no such run, or Slurm refuses.
        DataError: if a record cannot be understood.
    """
    said = []
    found = watch.runs_of(runs)
    for (run, kept), own in zip(found, watch.states(kept for _, kept in found), strict=True):
        active = [job for job, state in own.items() if state.is_active]
        if kept.cluster == "slurm" and active:
            slurm.cancel(active)
        elif kept.cluster == "local":
            for job in active:
                psutil.Process(int(job)).send_signal(signal.SIGINT)
        said += [f"{run}: job {job} cancelled" for job in active]
        if not active:
            said.append(f"{run}: no job of it waits or runs")
    return said
