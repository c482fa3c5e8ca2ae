"""Write a scaling report: Markdown, CSV and pictures, from run folders."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hvdtrain import __version__
from hvdtrain.errors import DataError
from hvdtrain.host import files
from hvdtrain.study import agreement, plots
from hvdtrain.study.results import Result, find, machines
from hvdtrain.study.series import Series, Size, arrange
from hvdtrain.study.statistics import Estimate, Fit, usl_peak

RUN_COLUMNS = (
    "model",
    "plan",
    "ranks",
    "threads",
    "batch_size",
    "seed",
    "samples",
    "seconds",
    "startup_seconds",
    "train_seconds",
    "images_per_second",
    "exposed",
    "bubble",
    "data",
    "imbalance",
    "peak_memory_bytes",
    "accuracy",
    "core_hours",
)


def write(runs: list[str], to: str, efficiency: float, price: float | None) -> Path:
    """Write the report of these runs into the folder `to`; return the path of `report.md`.

    Args:
        runs: run folders, or folders that contain some.
        to: folder for the report.
        efficiency: smallest efficiency that is worth paying for, 0 to 1.
        price: price of a core-hour, in any currency.

    Raises:
        UsageError: if there is no finished run.
        DataError: if the report cannot be written.
    """
    results, left_out = find(runs)
    all_series, without = arrange(results)
    folder = Path(to)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pictures = plots.draw(all_series, folder) if all_series else {}
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror}") from None
    text = as_markdown(all_series, results, [*left_out, *without], pictures, efficiency, price)
    for name, content in (
        ("report.md", text),
        ("runs.csv", _runs_csv(results)),
        ("sizes.csv", _sizes_csv(all_series, agreement.counts_shown(results))),
    ):
        files.write_text(folder / name, content, "the report", DataError)
    return folder / "report.md"


def as_markdown(
    all_series: Sequence[Series],
    results: Sequence[Result],
    left_out: Sequence[str],
    pictures: dict[str, str],
    efficiency: float,
    price: float | None,
) -> str:
    """Return the text of the report."""
    parts = ["# Scaling report", origin(results)]
    parts += [_section(series, efficiency, price) for series in all_series]
    if not all_series:
        parts.append("No runs on one and on several ranks with the same settings to compare.")
    if ways := agreement.rows(results):
        parts += ["## How replicas agreed", AGREEMENT, markdown_table(ways)]
    parts += [f"![{text}]({name})\n\n*{text}*" for name, text in pictures.items()]
    parts += ["## Intervals", INTERVALS]
    if all_series:
        parts += ["## For a paper", methods(all_series, results), f"```bibtex\n{BIBTEX}\n```"]
    if left_out:
        parts += ["## Left out", "\n".join(f"- {line}" for line in left_out)]
    return "\n\n".join(parts) + "\n"


def origin(results: Sequence[Result]) -> str:
    """Return a list of machines, versions, seeds and settings."""
    seeds = sorted({result.seed for result in results})
    versions: dict[str, list[str]] = {}
    for result in results:
        for name, version in result.versions.items():
            if version not in versions.setdefault(name, []):
                versions[name].append(version)
    settings = _common_settings(results)
    lines = [
        f"- Made by hvdtrain {__version__} from {len(results)} runs.",
        *(f"- Machine: {text}." for text in machines(list(results))),
        f"- Versions: {', '.join(f'{name} {_either(used)}' for name, used in versions.items())}.",
        f"- Seeds: {', '.join(map(str, seeds))}.",
        f"- Settings of all runs: {settings}.",
    ]
    return "\n".join(lines)


def _either(versions: Sequence[str]) -> str:
    return " or ".join(versions)


def _common_settings(results: Sequence[Result]) -> str:
    first = results[0].settings
    same = {
        name: value
        for name, value in first.items()
        if value not in (None, False)
        and name not in ("processor", "accelerator")  # in the line of the machine
        and all(result.settings.get(name) == value for result in results)
    }
    return ", ".join(f"{name} {value}" for name, value in same.items())


def _section(series: Series, efficiency: float, price: float | None) -> str:
    base = series.sizes[0].runs[0]
    best = series.best_serial[0]
    text = (
        f"The baseline is one rank with {_threads(base.threads)}, as many as each rank of the "
        "other sizes has"
    )
    text += (
        f" (global batch {base.batch_size})."
        if series.scaling == "strong"
        else f" (batch {base.batch_size} per rank)."
    )
    if best.threads != base.threads:
        text += f" The best serial run has {_threads(best.threads)}."
    parts = [f"## {series.title}", text, _table(series, price), _lost_table(series)]
    parts.append(_worth(series, efficiency))
    laws = [_law(fit, series.sizes[-1].ranks) for fit in series.fits]
    # Amdahl's law describes a problem of fixed size, so strong scaling only.
    missing = {"Amdahl", "USL"} if series.scaling == "strong" else {"USL"}
    missing -= {fit.name for fit in series.fits}
    laws += [
        f"- {name}: not fitted, {len(series.sizes)} sizes are too few." for name in sorted(missing)
    ]
    parts.append("\n".join(laws))
    return "\n\n".join(parts)


def _table(series: Series, price: float | None) -> str:
    epochs = max(len(run.epochs) for size in series.sizes for run in size.runs)
    rows = []
    for size in series.sizes:
        trained = [run.train_seconds for run in size.runs]
        memory = median([run.peak_memory_bytes for run in size.runs])
        row = {
            "ranks": str(size.ranks),
            "repeats": str(len(size.runs)),
            "images/s": number(size.images_per_second, ",.0f"),
            "speed-up": number(size.speedup, ".2f"),
            "efficiency": number(size.efficiency, ".2f"),
            "over the best serial run": number(size.speedup_over_best, ".2f"),
            f"seconds ({epochs} epochs)": number(size.seconds, ",.1f"),
            "communication": _part([run.exposed for run in size.runs], trained),
            "bubble": _part([run.bubble for run in size.runs], trained),
            "peak memory (MiB)": f"{memory / 2**20:,.0f}",
            "accuracy": _accuracy(size),
            "core-hours": number(size.core_hours, ".4f"),
        }
        if price is not None:
            row["cost"] = f"{size.core_hours.value * price:.3g}"
        rows.append(row)
    return markdown_table(rows)


def _lost_table(series: Series) -> str:
    rows = [
        {
            "ranks": str(size.ranks),
            "steps (s)": f"{median([run.train_seconds for run in size.runs]):,.1f}",
            "ideal": f"{size.lost.ideal:,.1f}",
            "slower computing": f"{size.lost.computing:+,.1f}",
            "communication": f"{size.lost.communication:+,.1f}",
            "imbalance": f"{size.lost.imbalance:+,.1f}",
            "bubble": f"{size.lost.bubble:+,.1f}",
            "data": f"{size.lost.data:+,.1f}",
            "start-up (not in steps)": f"{size.lost.startup:,.1f}",
        }
        for size in series.sizes
    ]
    return "Why scaling is not linear, in seconds:\n\n" + markdown_table(rows)


def _worth(series: Series, efficiency: float) -> str:
    most = series.worth(efficiency)
    return (
        f"At an efficiency of {efficiency:.0%} or more, the largest number of ranks worth paying "
        f"for is {most} (of the sizes measured)."
    )


def _law(fit: Fit, most: int) -> str:
    parameters = [
        f"{name.replace('_', ' ')} {number(item, ',.0f' if item.value > 1 else '.3g')}"
        for name, item in fit.parameters.items()
    ]
    text = f"- {fit.name}: {', '.join(parameters)}"
    if fit.name == "USL" and (peak := usl_peak(fit)) is not None:
        beyond = ", beyond the sizes measured" if peak > most else ""
        text += f"; throughput peaks at {peak:.1f} ranks{beyond}"
    return f"{text}. Caution: {fit.warning}." if fit.warning else f"{text}."


def number(estimate: Estimate, form: str) -> str:
    """Return an estimate with its interval as text."""
    text = format(estimate.value, form)
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} ({format(estimate.low, form)} to {format(estimate.high, form)})"


def _part(seconds: Sequence[float], whole: Sequence[float]) -> str:
    return f"{median([part / all_ for part, all_ in zip(seconds, whole, strict=True)]):.1%}"


def _accuracy(size: Size) -> str:
    known = [run.accuracy for run in size.runs if run.accuracy is not None]
    return f"{median(known):.4f}" if known else "-"


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table with a row per mapping, whose keys are the heads of the columns."""
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _runs_csv(results: Sequence[Result]) -> str:
    keys = agreement.counts_shown(results)
    names = [*RUN_COLUMNS, *(["agreement"] if keys else [])]
    rows = [
        [
            str(run.path),
            *(getattr(run, name) for name in names),
            *(run.counted.get(key) for key in keys),
        ]
        for run in results
    ]
    return as_csv(["run", *names, *keys], rows)


def _sizes_csv(all_series: Sequence[Series], counts: Sequence[str]) -> str:
    names = ("images_per_second", "speedup", "efficiency", "speedup_over_best", "seconds")
    heads = ["model", "plan", "precision", "scaling", "ranks", "repeats"]
    heads += [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
    heads += ["agreement", *counts] if counts else []
    rows = []
    for series in all_series:
        for size in series.sizes:
            row: list[Any] = [series.model, series.plan, series.precision, series.scaling]
            row += [size.ranks, len(size.runs)]
            for name in names:
                estimate = getattr(size, name)
                row += [estimate.value, estimate.low, estimate.high]
            if counts:
                row += [series.agreement]
                row += [agreement.median_count(size.runs, key) for key in counts]
            rows.append(row)
    return as_csv(heads, rows)


def as_csv(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows below their heads as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(rows)
    return text.getvalue()


INTERVALS = (
    "Numbers are medians of repeats. Intervals are 95 % percentile bootstrap intervals of the "
    "median, or of the ratio of two medians. With few repeats they cannot be wider than the "
    "range of the repeats, so read them as that range. Communication, bubble and data are seconds "
    "in which ranks waited, as parts of their own time, means over the ranks. Imbalance is the "
    "part of the waiting that a slower rank explains. Slower computing is the remainder: shared "
    "caches, memory and cores, and smaller pieces of a batch. It is negative if the pieces fit "
    "better. Core-hours are ranks times threads times the time of all starts from their first "
    "step on, and the start-up of the last one. Steps that a killed run had to repeat are not "
    "included."
)

AGREEMENT = (
    "Bytes are those that a rank sends if each operation sends as few as any algorithm can: means "
    "over ranks and steps. Those of checkpoints are included, for which replicas that train apart "
    "average what differs. The residual norm is that of what a rank has not sent at the end. All "
    "numbers are medians of repeats."
)

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
    hvdtrain, horovod = (
        _all(run.versions.get(name) or "of unknown version" for run in runs)
        for name in ("hvdtrain", "horovod")
    )
    known = {name: {run.versions[name] for run in runs if name in run.versions} for name in NAMES}
    frameworks = " and ".join(
        f"{NAMES[name]} {_all(known[name])}" for name in NAMES if known[name]
    )
    return (
        f"We measured {scaling} scaling of {models} on {', '.join(map(str, sizes))} ranks "
        f"({' and '.join(machines(runs))}) with hvdtrain {hvdtrain}, {frameworks or 'PyTorch'} "
        f"and Horovod {horovod}. Each rank used {threads} thread(s), also in the baseline of one "
        f"rank. Each size was run {counts} time(s) for {epochs} epoch(s). "
        "Throughput is the number of images divided by the wall time of the training steps, "
        "without start-up and evaluation. We report medians with 95 % bootstrap intervals, "
        "following Hoefler and Belli (2015)."
    )


def _all(values: Iterable[object]) -> str:
    """Return the distinct values, joined by "or"."""
    return " or ".join(sorted(set(map(str, values))))
