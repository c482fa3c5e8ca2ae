"""The repeats that each size of a study needs, from the runs that are done: `repeats: auto`."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from hvdtrain.errors import UsageError
from hvdtrain.jobs import record
from hvdtrain.study.results import Result, find
from hvdtrain.study.series import Size, arrange
from hvdtrain.study.statistics import Estimate, spread

LEAST = 3  # repeats: fewer show too little of the noise
MOST_MORE = 4  # repeats of a size in a round: the noise is not known well before


@dataclass
class Need:
    """Repeats that a study needs.

    Attributes:
        counts: number of repeats by name of the size; sizes that are missing need `LEAST`.
        remarks: a line for each size whose interval is too wide, and for a spent budget.
    """

    counts: dict[str, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def need(folder: Path, interval: float, most_core_hours: float | None) -> Need:
    """Return the repeats that the study in a folder needs, from its finished runs.

    No repeats are added while any of its runs is waiting or running.

    Raises:
        UsageError, DataError: as `record.active`.
    """
    runs = sorted(folder.glob("*-seed=*")) if folder.is_dir() else []
    counts = {name: max(count, LEAST) for name, count in Counter(map(size_name, runs)).items()}
    active = sum(bool(jobs) for jobs in record.active(runs).values())
    if active:
        waiting = f"{active} run(s) of {folder} are waiting or running: no repeats are added yet"
        return Need(counts, [waiting])
    return need_of(_finished(folder), counts, interval, most_core_hours)


def replacing(folder: Path, repeats: int) -> Need:
    """Return one repeat more for each run that something else slowed down, at most as many again.

    The runs themselves stay, and count in the report.

    Args:
        repeats: of each size without these.

    Raises:
        UsageError, DataError: as `need`.
    """
    done = _finished(folder)
    paths = {run.path for run in done if run.was_shared}
    paths |= {run.path for series in arrange(done)[0] for run in series.disturbed}
    slowed = {
        name: min(count, repeats) for name, count in sorted(Counter(map(size_name, paths)).items())
    }
    remarks = [f"{name}: {count} more, for disturbed runs" for name, count in slowed.items()]
    return Need({name: repeats + count for name, count in slowed.items()}, remarks)


def _finished(folder: Path) -> Sequence[Result]:
    try:
        return find([str(folder)]).results
    except UsageError:  # no run is finished, or there is none
        return []


def need_of(
    done: Sequence[Result],
    counts: Mapping[str, int],
    interval: float,
    most_core_hours: float | None,
) -> Need:
    """Return the repeats that sizes need until all speed-ups are known well enough.

    The interval shrinks with the square root of the repeats. Of a size and its baseline, the one
    with more noise gets more repeats.

    Args:
        done: finished runs.
        counts: repeats by name of the size so far, those that failed included.
        interval: half the width of the interval of a speed-up to reach, relative to it.
        most_core_hours: core-hours of all runs after which no repeats are added; None: no limit.
    """
    more: dict[str, int] = {}
    hours: dict[str, float] = {}
    remarks = []
    for series in arrange(done)[0]:
        base, *others = series.sizes
        for size in others:
            half = half_width(size.speedup)
            if half is None or half <= interval:
                continue
            remarks.append(
                f"{series.title}, {size.ranks} ranks: the speed-up is known to ±{half:.1%}"
            )
            noisy = max((base, size), key=_noise)
            missing = math.ceil(len(noisy.runs) * ((half / interval) ** 2 - 1))
            name = size_name(noisy.runs[0].path)
            more[name] = max(min(max(missing, 1), MOST_MORE), more.get(name, 0))
            hours[name] = mean(run.core_hours for run in noisy.runs)
    spent = sum(run.core_hours for run in done)
    added = sum(count * hours[name] for name, count in more.items())
    if most_core_hours is not None and more and spent + added > most_core_hours:
        remarks.append(
            f"{spent:.3g} core-hours are spent, and {added:.3g} more would exceed "
            f"most_core_hours: {most_core_hours:g}: no repeats are added"
        )
        more = {}
    return Need(
        dict(counts) | {name: counts.get(name, LEAST) + more[name] for name in more}, remarks
    )


def half_width(estimate: Estimate) -> float | None:
    """Return half the width of the interval of a ratio, relative to it; None without interval."""
    if estimate.low is None or estimate.high is None:
        return None
    return math.sqrt(estimate.high / estimate.low) - 1


def size_name(run: Path) -> str:
    """Return the name of the size of a run folder: without its seed."""
    return run.name.rpartition("-seed=")[0]


def _noise(size: Size) -> float:
    return spread([run.images_per_second for run in size.runs])
