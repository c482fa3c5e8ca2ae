"""Numbers with intervals, and tables as Markdown."""

import re
from collections.abc import Mapping, Sequence

from hvdtrain.data.images import shown
from hvdtrain.study.statistics import Estimate

# What means something to Markdown or HTML in a line, or at its start; a lone sign does not, nor
# an underscore within a word.
_MARKUP = re.compile(r"[&<>`*~|\\\[\]]|(?<!\w)_|_(?!\w)|^#|^[-+](?=[-+\s])")


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
    lines = [list(map(literal, line)) for line in (heads, *(row.values() for row in rows))]
    lines.insert(1, ["---"] * len(heads))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def literal(text: str) -> str:
    """Return a line with names, which may hold anything, as Markdown that shows them as they are.

    Characters become references such as &#91; for [, which no reader takes for Markdown.
    """
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", shown(text))
