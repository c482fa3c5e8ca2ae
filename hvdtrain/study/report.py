"""Write a scaling report from run folders: Markdown, HTML, LaTeX, CSV and pictures."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hvdtrain import __version__
from hvdtrain.errors import DataError
from hvdtrain.host import files
from hvdtrain.host.counters import Disturbance
from hvdtrain.study import forms, plots, sections
from hvdtrain.study.options import ReportOptions
from hvdtrain.study.results import COMPARED_DEFAULTS, Result, find, machines
from hvdtrain.study.series import Series, Size, arrange
from hvdtrain.study.statistics import literal, markdown_table, number, rate, ratio


def write(
    runs: list[str],
    to: str,
    efficiency: float = ReportOptions.efficiency,
    **others: Any,
) -> Path:
    """Write the report of these runs into the folder `to`; return the path of `report.md`.

    Args:
        runs: run folders, or folders that contain some.
        to: folder for the report.
        efficiency: smallest efficiency that is worth paying for, above 0 to 1.
        others: further fields of `ReportOptions`, which are the options of `hvdtrain report`.

    Raises:
        UsageError: if there is no finished run, or a value is out of range.
        DataError: if the report cannot be written.
    """
    wanted = ReportOptions(efficiency=efficiency, **others).check()
    results, left_out = find(runs)
    all_series, without = arrange(results)
    folder = Path(to)
    pairs = None
    if wanted.compare is not None:
        pairs = sections.pairs(all_series, arrange(find([wanted.compare])[0])[0])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror}") from None
    pictures = plots.draw(all_series, folder) if all_series else {}
    text = as_markdown(all_series, results, [*left_out, *without], pictures, wanted, pairs)
    contents = {
        "report.md": text,
        "report.html": forms.page(text, folder),
        "tables.tex": forms.latex_tables(all_series),
        "runs.csv": forms.runs_csv(results),
        "sizes.csv": forms.sizes_csv(all_series, sections.counts_shown(results)),
    }
    if pairs is not None:
        contents["comparison.csv"] = sections.pairs_csv(pairs)
    for name, content in contents.items():
        files.write_text(folder / name, content, "the report", DataError)
    return folder / "report.md"


def as_markdown(
    all_series: Sequence[Series],
    results: Sequence[Result],
    left_out: Sequence[str],
    pictures: dict[str, str],
    wanted: ReportOptions,
    pairs: Sequence[sections.Pair] | None,
) -> str:
    """Return the text of the report."""
    parts = ["# Scaling report", origin(results)]
    parts += [_section(series, wanted) for series in all_series]
    if not all_series:
        parts.append("No runs on one and on several ranks with the same settings to compare.")
    if pairs is not None:
        base = str(wanted.compare)
        parts += [f"## Compared with {literal(base)}", sections.comparison_section(pairs, base)]
    if ways := sections.agreement_rows(results):
        parts += ["## How replicas agreed", AGREEMENT, markdown_table(ways)]
    parts += [f"![{text}]({name})\n\n*{text}*" for name, text in pictures.items()]
    parts += ["## Intervals", INTERVALS]
    if all_series:
        parts += ["## For a paper", literal(sections.methods(all_series, results))]
        parts.append(f"```bibtex\n{sections.BIBTEX}\n```")
    if lines := _disturbed(all_series):
        parts += ["## Disturbed runs", DISTURBED, _list(lines)]
    if left_out:
        parts += ["## Left out", _list(left_out)]
    return "\n\n".join(parts) + "\n"


def _disturbed(all_series: Sequence[Series]) -> list[str]:
    """Return a line for each run that is slower than its repeats, or whose cores were shared."""
    reasons: dict[str, list[str]] = {}
    for series in all_series:
        for run in series.disturbed:
            text = f"{run.images_per_second:,.0f} images/s on {run.ranks} rank(s)"
            reasons.setdefault(run.name, [f"{text}, slower than its repeats"])
    for run in {run.path: run for one in all_series for run in one.runs}.values():
        for host, shared in run.disturbances.items():
            if shared.is_large:
                reasons.setdefault(run.name, []).append(_shared(host, shared))
    return [f"{name}: {'; '.join(texts)}." for name, texts in reasons.items()]


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {literal(line)}" for line in lines)


def _shared(host: str, shared: Disturbance) -> str:
    text = (
        f"on {host} other processes used {shared.other_cores:.2f} of {shared.cores} core(s), the "
        f"hypervisor {shared.stolen_cores:.2f}"
    )
    if shared.throttled_fraction:
        text += f", and a core was slowed down for {shared.throttled_fraction:.1%} of the time"
    return text


def origin(results: Sequence[Result]) -> str:
    """Return a list of machines, versions, seeds and settings."""
    seeds = sorted({result.seed for result in results})
    versions: dict[str, dict[str, None]] = {}
    for result in results:
        for name, version in result.versions.items():
            versions.setdefault(name, {})[version] = None
    used = [f"{name} {' or '.join(several)}" for name, several in versions.items()]
    settings = _common_settings(results)
    lines = [
        f"Made by hvdtrain {__version__} from {len(results)} runs.",
        *(f"Machine: {text}." for text in machines(list(results))),
        f"Versions: {', '.join(used)}.",
        f"Seeds: {', '.join(map(str, seeds))}.",
        f"Settings of all runs (besides defaults): {settings}.",
    ]
    return _list(lines)


ALWAYS_SHOWN = ("optimizer", "lr", "precision")  # settings, also with their default


def _common_settings(results: Sequence[Result]) -> str:
    first = results[0].settings
    same = {
        name: value
        for name, value in first.items()
        if (value != COMPARED_DEFAULTS.get(name) or name in ALWAYS_SHOWN)
        and name not in ("processor", "accelerator")  # in the line of the machine
        and all(result.settings.get(name) == value for result in results)
    }
    return ", ".join(f"{name} {value}" for name, value in same.items())


def _section(series: Series, wanted: ReportOptions) -> str:
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
    parts = [f"## {literal(series.title)}", text]
    parts += [_table(series), _lost_table(series)]
    parts += _predicted(series)
    accuracy = wanted.to_accuracy or sections.expected_accuracy(series)
    if (text := sections.energy_section(series, accuracy)) != "":
        parts.append(text)
    if accuracy is not None:
        parts.append(sections.target_section(series, accuracy))
    parts.append(
        f"At an efficiency of {wanted.efficiency:.0%} or more, the largest number of ranks worth "
        f"paying for is {series.worth(wanted.efficiency)} (of the sizes measured)."
    )
    parts.append(sections.laws_text(series))
    return "\n\n".join(parts)


def _table(series: Series) -> str:
    epochs = max(len(run.epochs) for size in series.sizes for run in size.runs)
    rows = []
    for size in series.sizes:
        trained = [run.train_seconds for run in size.runs]
        memory = median([run.peak_memory_bytes for run in size.runs])
        accuracies = [run.accuracy for run in size.runs if run.accuracy is not None]
        row = {
            "ranks": str(size.ranks),
            "repeats": str(len(size.runs)),
            "images/s": rate(size.images_per_second),
            "speed-up": number(size.speedup, ".2f"),
            "efficiency": number(size.efficiency, ".2f"),
            "serial fraction": number(size.serial_fraction, ".3f")
            if size.serial_fraction
            else "-",
            "over the best serial run": number(size.speedup_over_best, ".2f"),
            f"seconds ({epochs} epoch{'s' if epochs != 1 else ''})": number(size.seconds, ",.1f"),
            "communication": _part([run.exposed for run in size.runs], trained),
            "bubble": _part([run.bubble for run in size.runs], trained),
            "peak memory (MiB)": f"{memory / 2**20:,.0f}",
            "accuracy": f"{median(accuracies):.4f}" if accuracies else "-",
            "core-hours": number(size.core_hours, ".4f"),
        }
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
            "between steps": f"{size.lost.between:,.1f}",
            "evaluation": "-" if size.lost.evaluation is None else f"{size.lost.evaluation:,.1f}",
            "start-up": f"{size.lost.startup:,.1f}",
        }
        for size in series.sizes
    ]
    lines = "\n".join(_why(size) for size in series.sizes if size.ranks > 1)
    return f"Why scaling is not linear, in seconds:\n\n{markdown_table(rows)}\n\n{lines}"


def _why(size: Size) -> str:
    """Return a line on how much of the steps' time is lost, and by what."""
    shares = size.lost.shares
    lost = sum(shares.values())
    if lost < LITTLE:
        return f"- {size.ranks} ranks: nothing is lost."
    parts = {name: share for name, share in shares.items() if share >= LITTLE}
    causes = [f"{share:.1%} by {name}" for name, share in (parts or shares).items()]
    if gain := -sum(share for share in shares.values() if share <= -LITTLE):
        causes.append(f"{gain:.1%} is won elsewhere, see the table")
    return f"- {size.ranks} ranks: {lost:.1%} of the steps' time is lost: {', '.join(causes)}."


def _predicted(series: Series) -> list[str]:
    """Return the planner's predictions beside what was measured, if it made the plans."""
    rows = []
    for size in series.sizes:
        runs = [run for run in size.runs if run.predicted_seconds and run.step_seconds]
        if runs:
            seconds = [float(run.predicted_seconds or 0.0) for run in runs]
            measured = [run.step_seconds for run in runs]
            off = ratio(seconds, measured).through(lambda value: value - 1)
            rows.append(
                {
                    "ranks": str(size.ranks),
                    "predicted step (ms)": f"{1e3 * median(seconds):,.1f}",
                    "measured step (ms)": f"{1e3 * median(measured):,.1f}",
                    "prediction is off by": number(off, "+.1%"),
                }
            )
    return [f"The planner's predictions:\n\n{markdown_table(rows)}"] if rows else []


def _part(seconds: Sequence[float], whole: Sequence[float]) -> str:
    return f"{median([part / all_ for part, all_ in zip(seconds, whole, strict=True)]):.1%}"


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


INTERVALS = (
    "Numbers are medians of repeats. Intervals are 95 % intervals of the median, or of the ratio "
    "of two medians, by Student's t distribution on the logarithms (two medians: Welch). They are "
    "wide where there are few repeats, because few repeats show little of the noise. The serial "
    "fraction is that of Karp and Flatt: if it rises with the ranks, communication grows; if it "
    "stays, a part of the work is serial. Laws are fitted to the logarithms of all repeats and "
    "compared by F-tests. Communication, bubble and data are seconds in which ranks waited, as "
    "parts of their own time, means over the ranks. Imbalance is the part of the waiting that a "
    "slower rank explains. Slower computing is the remainder: shared caches, memory and cores, "
    "and smaller pieces of a batch. It is negative if the pieces fit better. Between the steps "
    "are evaluation, which has its own column, too, and checkpoints; as the start-up, they are no "
    "part of the steps. Core-hours "
    "are ranks times threads times the time of all starts from their first step on, and the "
    "start-up of the last one. Steps that a killed run had to repeat are not included."
)

LITTLE = 0.005  # part of the time that is not worth a word


DISTURBED = (
    "These runs are slower than the other repeats of their size by more than noise explains, or "
    "shared their cores: other processes and the hypervisor took more than 5 % of them, or heat "
    "or a limit slowed them down for more than 2 % of the time, since the first step of the last "
    "start. They are included in all numbers above. Find out what else the machine was doing, and "
    "repeat them."
)

AGREEMENT = (
    "Bytes are those that a rank sends if each operation sends as few as any algorithm can: means "
    "over ranks and steps. Those of checkpoints are included, for which replicas that train apart "
    "average what differs. The residual norm is that of what a rank has not sent at the end. All "
    "numbers are medians of repeats."
)
