"""Estimates from finished runs: the time of a further run, and the repeats that a study needs."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import read_index
from hvdtrain.errors import DataError, UsageError
from hvdtrain.jobs import watch
from hvdtrain.jobs.options import JobOptions
from hvdtrain.options.sections import AUTO_PRECISION
from hvdtrain.study import results
from hvdtrain.study.laws import Estimate, spread
from hvdtrain.study.results import Result, find
from hvdtrain.study.series import Size, arrange

LEAST = 3  # repeats: fewer show too little of the noise
MOST_MORE = 4  # repeats of a size in a round: the noise is not known well before


def estimate(training: TrainConfig, job: JobOptions, runs: Path) -> str:
    """Return the estimated and the maximum hours and core-hours of a run, as text.

    The estimate comes from a finished run in `runs`. The maximum is that of one start: a requeued
    job gets its whole time limit again.

    Args:
        runs: folder with other runs.
    """
    cores = (training.ranks or 1) * job.cpus_per_rank
    limit = job.minutes() / 60
    most = f"at most {_hours(limit)}, {limit * cores:,.1f} core-hours per start"
    similar = _most_similar(training, runs)
    if similar is None:
        return f"{most}; no finished run of {training.model} in {runs} to estimate from"
    length = read_index(training.data).splits["train"].count
    samples = training.total_samples(length - round(length * training.holdout))
    ranks = training.ranks or 1
    rate = similar.images_per_second * ranks / similar.ranks
    seconds = samples / rate * similar.seconds / similar.train_seconds + similar.startup_seconds
    hours = seconds / 3600
    source = f"{similar.images_per_second:,.0f} images/s of {similar.path}"
    if similar.ranks != ranks:
        source += f" on {similar.ranks} rank(s), assuming linear scaling"
    if similar.threads != job.cpus_per_rank:
        source += f" with {similar.threads} thread(s) per rank"
    if similar.settings.get("data") != training.data:
        source += f" on {similar.settings.get('data')}"
    return f"about {_hours(hours)}, {hours * cores:,.1f} core-hours, from {source}; {most}"


def _most_similar(training: TrainConfig, runs: Path) -> Result | None:
    """Return the finished run of this model and precision that is most similar, or None.

    The same data counts most, then the number of threads, then the number of ranks.
    """
    candidates = []
    for path in runs.glob("*/summary.json"):
        with suppress(DataError):
            result = results.read(path.parent)
            is_same = result.model == training.model
            is_same &= training.precision in (AUTO_PRECISION, result.settings.get("precision"))
            if is_same and result.images_per_second > 0:
                candidates.append(result)

    ranks = training.ranks or 1

    def difference(result: Result) -> tuple[bool, bool, int]:
        other_data = result.settings.get("data") != training.data
        other_threads = result.threads != training.threads
        return other_data, other_threads, abs(result.ranks - ranks)

    return min(candidates, key=difference, default=None)


def _hours(hours: float) -> str:
    return f"{60 * hours:.0f} min" if hours < 2 else f"{hours:.1f} h"


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
        UsageError, DataError: as `watch.active`.
    """
    runs = sorted(folder.glob("*-seed=*")) if folder.is_dir() else []
    counts = {name: max(count, LEAST) for name, count in Counter(map(size_name, runs)).items()}
    active = sum(bool(jobs) for jobs in watch.active(runs).values())
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
        return find([str(folder)])[0]
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
