"""Numbers with intervals, and tables as Markdown and CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.study.statistics import Estimate


def number(estimate: Estimate, form: str) -> str:
    """Return an estimate with its interval as text."""
    text = format(estimate.value, form)
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} ({format(estimate.low, form)} to {format(estimate.high, form)})"


def rate(estimate: Estimate) -> str:
    """Return images/s with their interval as text, to about three digits."""
    return number(estimate, ",.0f" if estimate.value >= 100 else ",.1f")


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table with a row per mapping, whose keys are the heads of the columns."""
    heads = list(rows[0])
    cells = [[cell.replace("|", r"\|") for cell in row.values()] for row in rows]
    lines = [heads, ["---"] * len(heads), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_csv(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows below their heads as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(rows)
    return text.getvalue()
