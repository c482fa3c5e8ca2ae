"""Parts of a scaling report: agreement, comparison, time to an accuracy, energy, laws, methods."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median as middle
from typing import Any

from hvdtrain import __version__
from hvdtrain.errors import UsageError
from hvdtrain.host.records import as_csv
from hvdtrain.study.laws import (
    BEYOND,
    Estimate,
    Fit,
    cautions,
    literal,
    markdown_table,
    median,
    next_run,
    number,
    rate,
    ratio,
    usl_peak,
)
from hvdtrain.study.results import EXACT, Result, machines
from hvdtrain.study.series import Series, Size

# What ranks count, by its key in summary.json: its head in a table, and its format.
COUNTS: Mapping[str, tuple[str, str]] = {
    "sent_bytes_per_step": ("bytes sent per step and rank", ",.0f"),
    "meetings": ("meetings", ",.0f"),
    "residual_norm": ("residual norm", ".3g"),
    "mean_staleness": ("staleness, mean", ".2f"),
    "max_staleness": ("staleness, maximum", ",.0f"),
}


def counts_shown(results: Sequence[Result]) -> list[str]:
    """Return the counts that a report shows: none if all runs sum exactly in every step."""
    if all(result.agreement == EXACT for result in results):
        return []
    return [key for key in COUNTS if any(key in result.counted for result in results)]


def median_count(runs: Sequence[Result], key: str) -> float | None:
    """Return the median of a count over repeats; None if no run has it."""
    known = [run.counted[key] for run in runs if key in run.counted]
    return middle(known) if known else None


def agreement_rows(results: Sequence[Result]) -> list[dict[str, str]]:
    """Return a row per configuration on several ranks; none if all of them sum exactly."""
    keys = counts_shown(results)
    if not keys:
        return []
    groups: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
    for run in results:
        if run.ranks > 1:
            groups[run.model, run.plan, run.ranks, run.batch_size, run.agreement].append(run)
    return [_agreement_row(groups[group], keys) for group in sorted(groups)]


def _agreement_row(runs: Sequence[Result], keys: Sequence[str]) -> dict[str, str]:
    first = runs[0]
    accuracies = [run.accuracy for run in runs if run.accuracy is not None]
    row = {
        "model": first.model,
        "plan": first.plan,
        "ranks": str(first.ranks),
        "batch": str(first.batch_size),
        "agreement": first.agreement,
        "repeats": str(len(runs)),
        "images/s": f"{middle(run.images_per_second for run in runs):,.0f}",
        "accuracy": f"{middle(accuracies):.4f}" if accuracies else "-",
    }
    for key in keys:
        head, form = COUNTS[key]
        value = median_count(runs, key)
        row[head] = "-" if value is None else format(value, form)
    return row


HOW = (
    "The base is {base}. A ratio above 1 means more images/s than the base; its interval is for "
    "95 % by size. A difference is shown if the interval does not hold 1. Of many sizes, one in "
    "twenty differs by chance."
)


@dataclass(frozen=True)
class Pair:
    """A size that both studies have.

    Attributes:
        series: the series of the study, and `size` is its size.
        throughput: images/s of the study over those of the base.
        speedup: ratio of the two speed-ups over one rank; None on one rank.
    """

    series: Series
    size: Size
    base: Size
    throughput: Estimate
    speedup: float | None

    @property
    def verdict(self) -> str:
        """Return which one is faster, or that the runs do not show it."""
        low, high = self.throughput.low, self.throughput.high
        if low is None or high is None:
            return "a single run cannot tell"
        if low > 1:
            return "faster"
        return "slower" if high < 1 else "not shown"


def pairs(study: Sequence[Series], base: Sequence[Series]) -> list[Pair]:
    """Return the sizes of series that both studies have: of one title, with as many threads.

    Raises:
        UsageError: if the base has several such series.
    """
    bases = {_key(series): series for series in base}
    if len(bases) < len(base):
        several = next(one for one in base if bases[_key(one)] is not one)
        raise UsageError(
            f"the base has several series of {several.title}, which differ in other settings: "
            "name a folder that has the runs of one"
        )
    return [
        Pair(
            series,
            size,
            other,
            ratio(*([run.images_per_second for run in side.runs] for side in (size, other))),
            size.speedup.value / other.speedup.value if size.ranks > 1 else None,
        )
        for series in study
        if (match := bases.get(_key(series))) is not None
        for size in series.sizes
        for other in match.sizes
        if other.ranks == size.ranks
    ]


def comparison_section(compared: Sequence[Pair], base: str) -> str:
    """Return the comparison as Markdown."""
    if not compared:
        return (
            f"No size of {literal(base)} can be compared: model, plan, precision, scaling, batch, "
            "threads and agreement must be the same."
        )
    rows = [
        {
            "series": pair.series.title,
            "ranks": str(pair.size.ranks),
            "repeats": f"{len(pair.size.runs)} and {len(pair.base.runs)}",
            "images/s": rate(pair.size.images_per_second),
            "images/s of the base": rate(pair.base.images_per_second),
            "ratio": number(pair.throughput, ".3f"),
            "ratio of the speed-ups": "-" if pair.speedup is None else f"{pair.speedup:.3f}",
            "difference": pair.verdict,
        }
        for pair in compared
    ]
    return f"{HOW.format(base=literal(base))}\n\n{markdown_table(rows)}"


def pairs_csv(compared: Sequence[Pair]) -> str:
    """Return the comparison as CSV."""
    heads = ["series", "ranks", "images_per_second", "base_images_per_second"]
    heads += ["ratio", "ratio_low", "ratio_high", "speedup_ratio", "difference"]
    rows = [
        [
            *(pair.series.title, pair.size.ranks, pair.size.images_per_second.value),
            *(pair.base.images_per_second.value, pair.throughput.value, pair.throughput.low),
            *(pair.throughput.high, pair.speedup, pair.verdict),
        ]
        for pair in compared
    ]
    return as_csv(heads, rows)


def _key(series: Series) -> tuple[str, int]:
    return series.title, series.sizes[0].runs[0].threads


def seconds_to(run: Result, accuracy: float) -> float | None:
    """Return the seconds from the first step to the end of the first epoch that reached it."""
    reached = (
        epoch.seconds
        for epoch in run.epochs
        if epoch.seconds and epoch.accuracy is not None and epoch.accuracy >= accuracy
    )
    return next(reached, None)


def expected_accuracy(series: Series) -> float | None:
    """Return the test accuracy that all runs should reach; None if they have no common one."""
    wanted = {run.expected for size in series.sizes for run in size.runs}
    return wanted.pop() if len(wanted) == 1 else None


def target_section(series: Series, accuracy: float) -> str:
    """Return a table of the time to an accuracy.

    The time is that of the runs that reached it, and the table says how many did.
    """
    base = _seconds_of_reached(series.sizes[0].runs, accuracy)
    rows = []
    for size in series.sizes:
        seconds = _seconds_of_reached(size.runs, accuracy)
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


def _seconds_of_reached(runs: Sequence[Result], accuracy: float) -> list[float]:
    times = (seconds_to(run, accuracy) for run in runs)
    return [seconds for seconds in times if seconds is not None]


ENERGY = (
    "Energy, evaluation included. RAPL counts whole processors and NVML all GPUs that the host "
    "shows, so on a shared host those of other jobs, too; neither counts memory, power supplies, "
    "fans or the network. Slurm counts what its plugin on the cluster reads, which may be whole "
    "hosts, and stands only where no other counter was readable. Nothing is estimated but what "
    "says so: runs without counters, or that restarted, are left out."
)


def energy_section(series: Series, accuracy: float | None) -> str:
    """Return a table of the energy of runs by size; empty if no run's was counted.

    Args:
        accuracy: up to which the energy is also given, as a share of the run's.
    """
    rows = []
    for size in series.sizes:
        runs = [run for run in size.runs if run.energy]
        row = {"ranks": str(size.ranks), "runs": str(len(runs))}
        if runs:
            per_images = [1e3 * joules(run) / run.samples for run in runs]
            epochs = [joules(run) / len(run.epochs) for run in runs if run.epochs]
            watts = [joules(run) / run.seconds for run in runs]
            row["joules per 1,000 images"] = number(median(per_images), ",.1f")
            row["joules per epoch"] = number(median(epochs), ",.0f") if epochs else "-"
            row["watts"] = number(median(watts), ",.1f")
        if runs and accuracy is not None:
            ends = ((run, seconds_to(run, accuracy)) for run in runs)
            until = [joules(run) * end / run.seconds for run, end in ends if end is not None]
            name = f"joules until {accuracy:.2%} (estimated: the share of the run's time)"
            row[name] = number(median(until), ",.0f") if until else "-"
        row["counted by"] = " and ".join(sorted({name for run in runs for name in run.energy}))
        rows.append(row)
    if not any(row["counted by"] for row in rows):
        return ""
    names = max(rows, key=len).keys()
    table = markdown_table([{name: row.get(name, "-") for name in names} for row in rows])
    return f"{ENERGY}\n\n{table}"


def joules(run: Result) -> float:
    """Return the joules of a run, of all sources."""
    return sum(run.energy.values())


def laws_text(series: Series) -> str:
    """Return the fitted laws, the simplest one that describes the runs, and its predictions."""
    laws, most = series.laws, series.sizes[-1].ranks
    if not laws.fits:
        return f"No scaling law is fitted: {len(series.sizes)} sizes are too few."
    lines = [_line(fit, most) for fit in laws.fits if fit.values]
    if not laws.fits[0].has_repeats:
        reason = "repeat each size to see which law describes these runs"
        return "\n".join([*lines, f"- Without repeats nothing is known of the noise: {reason}."])
    if laws.law is None:
        reason = "so no throughput beyond the sizes measured is predicted"
        return "\n".join([*lines, f"- No law describes these runs, {reason}."])
    law = laws.law
    if law.name == "linear" and law.is_misfit:
        worst = max(map(abs, law.misfits.values()))
        lines.append(f"- These runs are within {worst:.1%} of linear scaling.")
    elif law.name == "linear":
        lines.append("- These runs do not differ from linear scaling by more than noise.")
    else:
        lines.append(f"- The simplest law that describes these runs is {law.name}.")
    richest = laws.fits[-1]
    if richest is not laws.law and richest.has_repeats:
        target = BEYOND[-1] * most
        speedup = number(richest.predicted(target, over=1), ",.1f")
        lines.append(
            f"- If {richest.name} holds nevertheless, the speed-up on {target} ranks is {speedup}."
        )
    if (narrowing := next_run(laws.law, BEYOND[-1] * most)) is not None:
        ranks, before, after = narrowing
        lines.append(
            f"- One more run on {ranks} rank(s) would tell most: it narrows the interval for "
            f"{BEYOND[-1] * most} ranks from ±{before:.1%} to about ±{after:.1%}."
        )
    rows = [
        {
            "ranks": str(times * most),
            "images/s": rate(law.predicted(times * most)),
            "speed-up": number(law.predicted(times * most, over=1), ",.2f"),
        }
        for times in BEYOND
    ]
    beyond = f"Beyond the sizes measured, by {law.name}, if nothing else changes:"
    return "\n\n".join(["\n".join(lines), beyond, markdown_table(rows)])


def _line(fit: Fit, most: int) -> str:
    parameters = [
        f"{name.replace('_', ' ')} {number(item, '.3g') if name in fit.values else rate(item)}"
        for name, item in fit.parameters.items()
    ]
    text = f"- {fit.name}: {', '.join(parameters)}"
    if fit.name == "USL" and (peak := usl_peak(fit)) is not None:
        beyond = ", beyond the sizes measured" if peak > most else ""
        text += f"; throughput peaks at {peak:.1f} ranks{beyond}"
    caution = cautions(fit)
    return f"{text}. Caution: {caution}." if caution else f"{text}."


# By the names of the distributions in a run's versions.
NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "tensorflow-cpu": "TensorFlow"}

BIBTEX = f"""@software{{hvdtrain,
  title   = {{hvdtrain: training image classifiers on many processes}},
  version = {{{__version__}}},
  year    = {{2026}},
}}
@article{{horovod,
  title   = {{Horovod: fast and easy distributed deep learning in TensorFlow}},
  author  = {{Sergeev, Alexander and Del Balso, Mike}},
  journal = {{arXiv preprint arXiv:1802.05799}},
  year    = {{2018}},
}}
@inproceedings{{hoefler2015,
  title     = {{Scientific benchmarking of parallel computing systems}},
  author    = {{Hoefler, Torsten and Belli, Roberto}},
  booktitle = {{Proceedings of SC15}},
  doi       = {{10.1145/2807591.2807644}},
  year      = {{2015}},
}}"""


def methods(all_series: Sequence[Series], results: Sequence[Result]) -> str:
    """Return a paragraph for the methods section of a paper, with the settings of the runs."""
    all_sizes = [size for series in all_series for size in series.sizes]
    runs = [run for size in all_sizes for run in size.runs] or list(results)
    repeats = sorted({len(size.runs) for size in all_sizes})
    counts = str(repeats[0]) if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
    sizes = sorted({size.ranks for size in all_sizes})
    models = ", ".join(sorted({series.model for series in all_series}))
    scaling = " and ".join(sorted({series.scaling for series in all_series}))
    epochs = _all(len(run.epochs) for run in runs)
    threads = _all(run.threads for run in runs)
    hvdtrain = _all(run.versions.get("hvdtrain") or "of unknown version" for run in runs)
    sums = " and ".join(sorted({_summed_by(run) for run in runs if run.summed_by is not None}))
    known = {name: {run.versions[name] for run in runs if name in run.versions} for name in NAMES}
    frameworks = " and ".join(
        f"{NAMES[name]} {_all(known[name])}" for name in NAMES if known[name]
    )
    return (
        f"We measured {scaling} scaling of {models} on {', '.join(map(str, sizes))} ranks "
        f"({' and '.join(machines(runs))}) with hvdtrain {hvdtrain} and "
        f"{frameworks or 'PyTorch'}. {f'{sums} summed the gradients. ' if sums else ''}Each rank "
        f"used {threads} thread(s), also in the baseline of one rank. Each size was run {counts} "
        f"time(s) for {epochs} epoch(s). "
        "Throughput is the number of images divided by the wall time of the training steps, "
        "without start-up and evaluation. We report medians of the repeats with 95 % intervals by "
        "Student's t distribution on the logarithms (ratios: Welch), following Hoefler and Belli "
        "(2015) in what is reported."
    )


def _summed_by(run: Result) -> str:
    """Return the library that summed a run's gradients, with its version."""
    if run.summed_by == "torch":
        return "torch.distributed"
    if run.summed_by == "mpi":
        version = run.versions.get("openmpi")
        return f"MPI (Open MPI {version})" if version else "MPI"
    return f"Horovod {run.versions.get('horovod') or 'of unknown version'}"


def _all(values: Iterable[object]) -> str:
    """Return the distinct values, joined by "or"."""
    return " or ".join(sorted(set(map(str, values))))
