"""Submit the jobs of a study."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from hvdtrain.jobs import site, watch
from hvdtrain.jobs.grid import Cell, Grid
from hvdtrain.jobs.record import LOGS
from hvdtrain.jobs.slurm import Request, dry_run
from hvdtrain.jobs.submit import (
    check,
    check_runs,
    joined_numbers,
    reasons_to_skip,
    submit_and_record,
)
from hvdtrain.jobs.task import submission_lock
from hvdtrain.options.configfile import MAY_CHANGE_IN_STUDY


def sweep(grid: Grid, folder: str, is_dry: bool) -> Iterator[str]:
    """Submit every run of a study that is not done yet; yield the lines to print.

    Each size is one submission, because the runs of an array request the same nodes; its repeats
    are the array. A second sweep submits only the runs that failed. Without Slurm, all runs are
    one job on this machine, one after the other.

    Raises:
        UsageError, DataError: as `submit`; nothing is submitted if any run is refused.
    """
    requests = [_request(cell, grid, folder) for cell in grid.cells]
    check(requests)
    check_runs(request.runs[0] for request in requests)
    with nullcontext() if is_dry else submission_lock(Path(folder)):
        yield from _submit(requests, grid, folder, is_dry)


def _submit(requests: list[Request], grid: Grid, folder: str, is_dry: bool) -> Iterator[str]:
    all_runs = [run for request in requests for run in request.runs]
    folders = [run.run for run in all_runs]
    reasons = dict(zip(folders, reasons_to_skip(all_runs, MAY_CHANGE_IN_STUDY), strict=True))
    yield from filter(None, reasons.values())
    pending = []
    for request in requests:
        if runs := tuple(run for run in request.runs if not reasons[run.run]):
            pending.append(replace(request, runs=runs))
    if is_dry:
        yield from map(dry_run, pending)
        return
    if pending and pending[0].job.cluster == "local":
        pending = [_merged(pending, Path(folder))]
    limit = grid.options.in_flight
    others = watch.active(map(Path, filter(None, folders))) if limit is not None else {}
    earlier = [number for numbers in others.values() for number in numbers]
    submitted: list[list[str]] = []
    for request in pending:
        submitted.append(submit_and_record(request, _dependency(grid, earlier, submitted)))
        count = f"{len(request.runs)} run{'s' if len(request.runs) > 1 else ''}"
        yield f"{request.name}: {count}, job {joined_numbers(submitted[-1]).replace(':', ', ')}"


def _request(cell: Cell, grid: Grid, folder: str) -> Request:
    most = grid.options.in_flight or len(cell.runs)
    return Request(
        runs=cell.runs,
        job=cell.job,
        site=site.load(cell.job.site),
        logs=Path(folder) / LOGS,
        name=Path(cell.runs[0].run or "").name.rpartition("-seed=")[0],
        parallel=min(most, len(cell.runs)),
    )


def _merged(requests: list[Request], folder: Path) -> Request:
    """Return one request for all runs, with the sum of their time limits."""
    runs = [run for request in requests for run in request.runs]
    minutes = sum(request.job.minutes() * len(request.runs) for request in requests)
    job = replace(requests[0].job, time=str(minutes))
    return replace(requests[0], runs=tuple(runs), job=job, name=folder.name)


def _dependency(grid: Grid, earlier: list[str], submitted: list[list[str]]) -> str | None:
    """Return the dependency of the next submission that keeps to the study's `in_flight`.

    Args:
        earlier: jobs of the study that were waiting or running before this sweep.
        submitted: job numbers of the submissions of this sweep.
    """
    if grid.options.in_flight is None:
        return None
    together = max(1, grid.options.in_flight // grid.options.repeats)
    before = submitted[-together] if len(submitted) >= together else earlier
    return f"afterany:{joined_numbers(before)}" if before else None
