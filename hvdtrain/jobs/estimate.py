"""How long a run may take, from runs that are done."""

from contextlib import suppress
from pathlib import Path

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import read_index
from hvdtrain.errors import DataError
from hvdtrain.jobs.options import JobOptions
from hvdtrain.study import results
from hvdtrain.study.results import Result


def estimate(training: TrainConfig, job: JobOptions, runs: Path) -> str:
    """Hours and core-hours in words: from a finished run beside this one, and the most possible.

    The most is that of one start: a job that goes back into the queue has its time anew.

    Args:
        runs: folder of other runs.
    """
    cores = (training.ranks or 1) * job.cpus_per_rank
    limit = job.minutes() / 60
    most = f"at most {_hours(limit)}, {limit * cores:,.1f} core-hours a start"
    like = _most_like(training, runs)
    if like is None:
        return f"{most}; no finished run of {training.model} in {runs} to estimate it from"
    length = read_index(training.data).splits["train"].count
    samples = training.total_samples(length - round(length * training.holdout))
    ranks = training.ranks or 1
    rate = like.images_per_second * ranks / like.ranks
    hours = (samples / rate * like.seconds / like.train_seconds + like.startup_seconds) / 3600
    how = f"{like.images_per_second:,.0f} images/s of {like.path}"
    if like.ranks != ranks:
        how += f" on {like.ranks} rank(s), if it scales"
    if like.threads != job.cpus_per_rank:
        how += f" with {like.threads} thread(s) a rank"
    if like.settings.get("data") != training.data:
        how += f" on {like.settings.get('data')}"
    return f"about {_hours(hours)}, {hours * cores:,.1f} core-hours by the {how}; {most}"


def _most_like(training: TrainConfig, runs: Path) -> Result | None:
    """A finished run of the model in this precision; of this data, with as many threads and ranks
    if there is one.
    """
    found = []
    for path in runs.glob("*/summary.json"):
        with suppress(DataError):
            result = results.read(path.parent)
            if (result.model, result.settings.get("precision")) == (
                *(training.model, training.precision),
            ) and result.images_per_second > 0:
                found.append(result)

    ranks = training.ranks or 1

    def difference(result: Result) -> tuple[bool, bool, int]:
        other_data = result.settings.get("data") != training.data
        other_threads = result.threads != training.threads
        return other_data, other_threads, abs(result.ranks - ranks)

    return min(found, key=difference, default=None)


def _hours(hours: float) -> str:
    return f"{60 * hours:.0f} min" if hours < 2 else f"{hours:.1f} h"
