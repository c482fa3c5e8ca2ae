"""Estimate how long a run may take, from finished runs."""

from contextlib import suppress
from pathlib import Path

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import read_index
from hvdtrain.errors import DataError
from hvdtrain.jobs.options import JobOptions
from hvdtrain.options.deviceoptions import AUTO_PRECISION
from hvdtrain.study import results
from hvdtrain.study.results import Result


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
