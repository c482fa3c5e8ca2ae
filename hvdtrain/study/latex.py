"""Tables of a scaling report for LaTeX, with the rules of the booktabs package."""

from collections.abc import Sequence

from hvdtrain.study.series import Series, Size
from hvdtrain.study.statistics import Estimate

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


def tables(all_series: Sequence[Series]) -> str:
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
