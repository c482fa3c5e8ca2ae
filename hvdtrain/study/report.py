"""Write a scaling report from run folders: Markdown, HTML, LaTeX, CSV and pictures."""

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from markdown import Markdown

from hvdtrain import __version__
from hvdtrain.errors import DataError
from hvdtrain.host import files
from hvdtrain.host.counters import Disturbance
from hvdtrain.host.records import as_csv
from hvdtrain.study import plots, sections
from hvdtrain.study.laws import Estimate, literal, markdown_table, number, rate, ratio
from hvdtrain.study.options import ReportOptions
from hvdtrain.study.results import COMPARED_DEFAULTS, Result, find, machines
from hvdtrain.study.sections import counts_shown, median_count
from hvdtrain.study.series import Series, Size, arrange


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
    parts = ["# Scaling report", origin(results)]
    parts += [_section(series, wanted) for series in all_series]
    compared = {run.path for series in all_series for run in series.runs}
    if alone := [run for run in results if run.path not in compared]:
        parts += _alone(alone, folder)
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
    if left_out or without:
        parts += ["## Not compared", _list([*left_out, *without])]
    text = "\n\n".join(parts) + "\n"
    contents = {
        "report.md": text,
        "report.html": page(text, folder),
        "tables.tex": latex_tables(all_series),
        "runs.csv": runs_csv(results),
        "sizes.csv": sizes_csv(all_series, sections.counts_shown(results)),
    }
    if pairs is not None:
        contents["comparison.csv"] = sections.pairs_csv(pairs)
    for name, content in contents.items():
        files.write_text(folder / name, content, "the report", DataError)
    return folder / "report.md"


def _alone(runs: Sequence[Result], folder: Path) -> list[str]:
    """Return a section on runs that are compared with no others, with curves of some of them."""
    rows, names = [], {name: None for run in runs for name in run.settings}
    differing = [name for name in names if len({str(run.settings.get(name)) for run in runs}) > 1]
    for run in runs:
        last = run.epochs[-1] if run.epochs else None
        losses = (last.train_loss, last.loss, last.accuracy) if last else (None, None, None)
        shown = ["-" if value is None else f"{value:.4f}" for value in losses]
        values = {name: run.settings.get(name) for name in differing}
        settings = (f"{name} {one}" for name, one in values.items() if one is not None)
        rows.append(
            {
                "run": literal(run.name),
                "plan": literal(run.plan),
                "ranks": str(run.ranks) if run.has_one_size else f"{run.ranks} at the end",
                "images/s": f"{run.images_per_second:,.0f}",
                "epochs": str(len(run.epochs)),
                "seconds": f"{run.seconds:,.1f}",
                "communication": f"{run.exposed / run.train_seconds:.1%}",
                "peak memory (MiB)": f"{run.peak_memory_bytes / 2**20:,.0f}",
                **dict(zip(("training loss", "test loss", "accuracy"), shown, strict=True)),
            }
        )
        if differing:
            rows[-1]["settings that differ"] = literal(", ".join(settings)) or "-"
    parts = ["## Runs", RUNS, markdown_table(rows)]
    first = {run.name: [run] for run in runs[: len(plots.COLOURS)]}
    more = f", of the first {len(first)} runs" if len(first) < len(runs) else ""
    for name, label in (("accuracy", "test accuracy"), ("train_loss", "training loss")):
        epochs = [epoch for (run,) in first.values() for epoch in run.epochs]
        if any(getattr(epoch, name) is not None for epoch in epochs):
            plots.draw_by_epoch(first, name, label, folder / f"runs_{name}.png")
            text = f"{label[0].upper()}{label[1:]} by epoch{more}."
            parts.append(f"![{text}](runs_{name}.png)\n\n*{text}*")
    return parts


RUNS = (
    "These runs are compared with no others: that needs runs on one and on several ranks, with "
    "the same settings and threads per rank."
)


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
    parts += [_table(series)]
    if noisy := [size for size in series.sizes if _is_noisy(size.speedup)]:
        parts.append("\n".join(map(_noise, noisy)))
    parts += [_lost_table(series)]
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


NOISY = 2.0  # ratio of the ends of an interval from which on its middle says little


def _is_noisy(estimate: Estimate) -> bool:
    low, high = estimate.low, estimate.high
    return low is not None and high is not None and high > NOISY * max(low, 0.0)


def _noise(size: Size) -> str:
    return (
        f"- {size.ranks} ranks: the repeats differ widely, and these numbers say little (speed-up"
        f" {number(size.speedup, '.2f')}): repeat the runs on a quiet machine."
    )


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
    "over ranks and steps. Those of checkpoints are included, for which replicas with local steps "
    "average what differs. The residual norm is that of what a rank has not sent at the end. All "
    "numbers are medians of repeats."
)


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 82rem; padding: 0 1rem;
  color: #1b1b1b; background: #fff; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
p, li { max-width: 45rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: .85rem;
  font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .6rem; text-align: right;
  vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
td small { white-space: nowrap; color: #555; }
thead th { border-bottom: 2px solid #444; }
img { max-width: 30rem; width: 100%; }
pre { background: #f5f5f5; overflow-x: auto; padding: .8rem; font-size: .8rem; }
@media print { body { font-size: 10pt; margin: 0; max-width: none; }
  table { display: table; font-size: 7pt; } h2, img, table { break-inside: avoid; }
  h2 { break-after: avoid; } img { max-width: 9cm; } @page { margin: 1.5cm; size: A4; } }
"""
_INTERVAL = re.compile(r"(<td[^>]*>[^<(]+) \(([^<()]+ to [^<()]+)\)</td>")
_PICTURE = re.compile(r"<p>!\[([^]\"<>]*)\]\(([\w.-]+\.png)\)</p>")
# A report has no links and no HTML, and its pictures are paragraphs: what else looks so is a name.
_FOREIGN = (
    *("html", "link", "image_link", "reference", "image_reference", "short_reference"),
    *("short_image_ref", "autolink", "automail"),
)


def page(text: str, folder: Path) -> str:
    """Return Markdown as an HTML page.

    Args:
        text: the report, whose first line is its title.
        folder: has the pictures that the report shows; the page holds them itself.
    """
    title = text.partition("\n")[0].lstrip("# ")
    reader = Markdown(extensions=["tables", "fenced_code", "sane_lists"])
    reader.preprocessors.deregister("html_block")
    for pattern in _FOREIGN:
        reader.inlinePatterns.deregister(pattern)
    body = reader.convert(text)

    def as_data(match: re.Match[str]) -> str:
        content = base64.b64encode((folder / match[2]).read_bytes()).decode()
        return f'<p><img alt="{match[1]}" src="data:image/png;base64,{content}" /></p>'

    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{_PICTURE.sub(as_data, _INTERVAL.sub(_below, body))}\n</body>\n</html>\n"
    )


def _below(match: re.Match[str]) -> str:
    """Return the cell of a number with its interval on a line of its own."""
    return f"{match[1]}<br /><small>{match[2]}</small></td>"


SPECIAL = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "\\": r"\textbackslash{}",
}
TABULAR = r"\begin{tabular}"
HEADS = ("Ranks", "Repeats", "Images/s", "Speed-up", "Efficiency", "Serial fraction")


def latex_tables(all_series: Sequence[Series]) -> str:
    r"""Return a table for each series; they need \usepackage{booktabs}."""
    return "\n".join(_latex_table(series, place) for place, series in enumerate(all_series, 1))


def escaped(text: str) -> str:
    """Return text in which LaTeX's special characters are literal."""
    return "".join(SPECIAL.get(character, character) for character in text)


def _latex_table(series: Series, place: int) -> str:
    threads = series.sizes[0].runs[0].threads
    caption = (
        f"Scaling of {escaped(series.title)}, {threads} thread(s) per rank. Medians with "
        r"95\,\% intervals (Student's t on logarithms)."
    )
    lines = [
        r"\begin{table}",
        r"  \centering\footnotesize\setlength{\tabcolsep}{4pt}",
        f"  \\caption{{{caption}}}",
        f"  \\label{{tab:scaling-{place}}}",
        f"  {TABULAR}{{@{{}}{'r' * len(HEADS)}@{{}}}}",
        r"    \toprule",
        f"    {' & '.join(HEADS)} \\\\",
        r"    \midrule",
        *(f"    {' & '.join(_row(size))} \\\\" for size in series.sizes),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _row(size: Size) -> list[str]:
    fraction = size.serial_fraction
    return [
        str(size.ranks),
        str(len(size.runs)),
        _number(size.images_per_second, ",.0f" if size.images_per_second.value >= 100 else ".1f"),
        _number(size.speedup, ".2f"),
        _number(size.efficiency, ".2f"),
        "--" if fraction is None else _number(fraction, ".3f"),
    ]


def _number(estimate: Estimate, form: str) -> str:
    """Return a number with its interval; a minus is not a hyphen."""
    texts = [f"{estimate.value:{form}}"]
    if estimate.low is not None and estimate.high is not None:
        texts.append(f"[{estimate.low:{form}}, {estimate.high:{form}}]")
    return "~".join(text.replace("-", r"$-$").replace(",", r"{,}") for text in texts)


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


def runs_csv(results: Sequence[Result]) -> str:
    """Return the numbers of each run."""
    keys = counts_shown(results)
    names = [*RUN_COLUMNS, *(["agreement"] if keys else [])]
    rows = [
        [
            run.name,
            *(getattr(run, name) for name in names),
            *(run.counted.get(key) for key in keys),
        ]
        for run in results
    ]
    return as_csv(["run", *names, *keys], rows)


def sizes_csv(all_series: Sequence[Series], counts: Sequence[str]) -> str:
    """Return the numbers of each size.

    Args:
        counts: keys of what ranks counted about their agreement that are columns.
    """
    names = (
        *("images_per_second", "speedup", "efficiency", "speedup_over_best", "seconds"),
        "serial_fraction",
    )
    heads = ["model", "plan", "precision", "scaling", "ranks", "repeats"]
    heads += [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
    heads += ["agreement", *counts] if counts else []
    rows = []
    for series in all_series:
        for size in series.sizes:
            row: list[Any] = [series.model, series.plan, series.precision, series.scaling]
            row += [size.ranks, len(size.runs)]
            for name in names:
                estimate = getattr(size, name)  # a serial fraction may be None
                row += [getattr(estimate, part, None) for part in ("value", "low", "high")]
            if counts:
                row += [series.agreement]
                row += [median_count(size.runs, key) for key in counts]
            rows.append(row)
    return as_csv(heads, rows)
