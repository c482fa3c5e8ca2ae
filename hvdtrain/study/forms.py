"""The other forms of a report: one HTML file without links, LaTeX tables, CSV files."""

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from markdown import Markdown

from hvdtrain.host.records import as_csv
from hvdtrain.study.results import Result
from hvdtrain.study.sections import counts_shown, median_count
from hvdtrain.study.series import Series, Size
from hvdtrain.study.statistics import Estimate

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
    return "\n".join(_table(series, place) for place, series in enumerate(all_series, 1))


def escaped(text: str) -> str:
    """Return text in which LaTeX's special characters are literal."""
    return "".join(SPECIAL.get(character, character) for character in text)


def _table(series: Series, place: int) -> str:
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
