"""The jobs of a study."""

from dataclasses import replace
from pathlib import Path

from hvdtrain.jobs import site
from hvdtrain.jobs.grid import Cell, Grid
from hvdtrain.jobs.record import LOGS
from hvdtrain.jobs.submit import Request, check, dry_run, make, not_needed, numbers_of


def sweep(grid: Grid, folder: str, is_dry: bool) -> list[str]:
    """Submit every run of a study that is not done yet; what became of each size, in lines.

    One submission a size, since the runs of an array ask for the same nodes; repeats are an array.
    Made again, it submits what failed and nothing else.

    Raises:
        UsageError, DataError: as `submit`.
    """
    requests = [_request(cell, grid, folder) for cell in grid.cells]
    for request in requests:
        check(request)
    if is_dry:
        return [dry_run(request) for request in requests]
    said, made = list[str](), list[list[str]]()
    for request in requests:
        reasons = [not_needed(run) for run in request.runs]
        said += filter(None, reasons)
        pending = [run for run, why in zip(request.runs, reasons, strict=True) if not why]
        if not pending:
            continue
        jobs = make(replace(request, runs=tuple(pending)), _dependency(grid, made))
        made.append(jobs)
        count = f"{len(pending)} run{'s' if len(pending) > 1 else ''}"
        said.append(f"{request.name}: {count}, job {numbers_of(jobs)}")
    return said


def _request(cell: Cell, grid: Grid, folder: str) -> Request:
    most = grid.options.in_flight or len(cell.runs)
    return Request(
        runs=cell.runs,
        job=cell.job,
        site=site.load(cell.job.site),
        logs=Path(folder) / LOGS,
        name=Path(cell.runs[0].run or "").name.rpartition("-seed=")[0] or cell.runs[0].model,
        parallel=min(most, len(cell.runs)),
    )


def _dependency(grid: Grid, made: list[list[str]]) -> str | None:
    """What the next submission has to wait for, so that no more runs than wanted are in flight."""
    if grid.options.in_flight is None:
        return None
    together = max(1, grid.options.in_flight // grid.options.repeats)
    if len(made) < together:
        return None
    return f"afterany:{numbers_of(made[-together])}"
