"""Time, and core-hours, until runs reached an accuracy."""

from collections.abc import Sequence

from hvdtrain.study.results import Result
from hvdtrain.study.series import Series
from hvdtrain.study.statistics import median, ratio
from hvdtrain.study.tables import markdown_table, number


def seconds_to(run: Result, accuracy: float) -> float | None:
    """Return the seconds from the first step to the end of the first epoch that reached it."""
    reached = (
        epoch.seconds
        for epoch in run.epochs
        if epoch.seconds and epoch.accuracy is not None and epoch.accuracy >= accuracy
    )
    return next(reached, None)


def expected(series: Series) -> float | None:
    """Return the test accuracy that all runs should reach; None if they have no common one."""
    wanted = {run.expected for size in series.sizes for run in size.runs}
    return wanted.pop() if len(wanted) == 1 else None


def section(series: Series, accuracy: float) -> str:
    """Return a table of the time to an accuracy.

    The time is that of the runs that reached it, and the table says how many did.
    """
    base = _reached(series.sizes[0].runs, accuracy)
    rows = []
    for size in series.sizes:
        seconds = _reached(size.runs, accuracy)
        is_compared = size.ranks > 1 and seconds and base
        hours = [size.runs[0].cores * value / 3600 for value in seconds]
        rows.append(
            {
                "ranks": str(size.ranks),
                "reached it": f"{len(seconds)} of {len(size.runs)}",
                "seconds": number(median(seconds), ",.1f") if seconds else "-",
                "speed-up": number(ratio(base, seconds), ".2f") if is_compared else "-",
                "core-hours": number(median(hours), ".4f") if hours else "-",
            }
        )
    return (
        f"Until the end of the first epoch with a test accuracy of {accuracy:.2%} or more "
        "(evaluation included, start-up not), for the runs that reached it:\n\n"
        + markdown_table(rows)
    )


def _reached(runs: Sequence[Result], accuracy: float) -> list[float]:
    times = (seconds_to(run, accuracy) for run in runs)
    return [seconds for seconds in times if seconds is not None]
