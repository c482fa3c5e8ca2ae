"""The jobs of a study."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from hvdtrain.configfile import MAY_CHANGE_IN_STUDY
from hvdtrain.jobs import site, watch
from hvdtrain.jobs.executor import Request, dry_run
from hvdtrain.jobs.grid import Cell, Grid
from hvdtrain.jobs.record import LOGS
from hvdtrain.jobs.submit import check, check_runs, make, not_needed, numbers_of
from hvdtrain.jobs.undisturbed import one_at_a_time


def sweep(grid: Grid, folder: str, is_dry: bool) -> Iterator[str]:
    """Submit every run of a study that is not done yet; what becomes of each size, in lines.

    One submission a size, since the runs of an array ask for the same nodes; repeats are an array.
    Made again, it submits what failed and nothing else. On this machine without Slurm all runs are
    one job, one after the other.

    Raises:
        UsageError, DataError: as `submit`; nothing is submitted if a run does not fit.
    """
    requests = [_request(cell, grid, folder) for cell in grid.cells]
    check(requests)
    check_runs(request.runs[0] for request in requests)
    with nullcontext() if is_dry else one_at_a_time(Path(folder)):
        yield from _submit(requests, grid, folder, is_dry)


def _submit(requests: list[Request], grid: Grid, folder: str, is_dry: bool) -> Iterator[str]:
    every = [run for request in requests for run in request.runs]
    folders = [run.run for run in every]
    reasons = dict(zip(folders, not_needed(every, MAY_CHANGE_IN_STUDY), strict=True))
    yield from filter(None, reasons.values())
    pending = []
    for request in requests:
        if runs := tuple(run for run in request.runs if not reasons[run.run]):
            pending.append(replace(request, runs=runs))
    if is_dry:
        yield from map(dry_run, pending)
        return
    if pending and pending[0].job.cluster == "local":
        pending = [_one_after_the_other(pending, Path(folder))]
    limit = grid.options.in_flight
    others = watch.active(map(Path, filter(None, folders))) if limit is not None else {}
    earlier = [number for numbers in others.values() for number in numbers]
    made: list[list[str]] = []
    for request in pending:
        made.append(make(request, _dependency(grid, earlier, made)))
        count = f"{len(request.runs)} run{'s' if len(request.runs) > 1 else ''}"
        yield f"{request.name}: {count}, job {numbers_of(made[-1]).replace(':', ', ')}"


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


def _one_after_the_other(requests: list[Request], folder: Path) -> Request:
    """One request for all runs, with time for all."""
    runs = [run for request in requests for run in request.runs]
    minutes = sum(request.job.minutes() * len(request.runs) for request in requests)
    job = replace(requests[0].job, time=str(minutes))
    return replace(requests[0], runs=tuple(runs), job=job, name=folder.name)


def _dependency(grid: Grid, earlier: list[str], made: list[list[str]]) -> str | None:
    """What the next submission has to wait for, so that no more runs than wanted run at a time.

    Args:
        earlier: jobs of the study that wait or run already.
    """
    if grid.options.in_flight is None:
        return None
    together = max(1, grid.options.in_flight // grid.options.repeats)
    before = made[-together] if len(made) >= together else earlier
    return f"afterany:{numbers_of(before)}" if before else None
