"""Two studies compared size by size: two clusters, two versions, two settings."""

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.host.harmless import as_csv
from hvdtrain.study.series import Series, Size
from hvdtrain.study.statistics import Estimate, ratio
from hvdtrain.study.tables import literal, markdown_table, number, rate


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
        _pair(series, size, other)
        for series in study
        if (match := bases.get(_key(series))) is not None
        for size in series.sizes
        for other in match.sizes
        if other.ranks == size.ranks
    ]


def section(compared: Sequence[Pair], base: str) -> str:
    """Return the comparison as Markdown."""
    if not compared:
        return (
            f"No size of {literal(base)} can be compared: model, plan, precision, scaling, batch, "
            "threads and way to agree must be the same."
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


HOW = (
    "The base is {base}. A ratio above 1 means more images/s than the base; its interval is for "
    "95 % by size. A difference is shown if the interval does not hold 1. Of many sizes, one in "
    "twenty differs by chance."
)


def _key(series: Series) -> tuple[str, int]:
    return series.title, series.sizes[0].runs[0].threads


def _pair(series: Series, size: Size, base: Size) -> Pair:
    rates, base_rates = ([run.images_per_second for run in side.runs] for side in (size, base))
    speedup = size.speedup.value / base.speedup.value if size.ranks > 1 else None
    return Pair(series, size, base, ratio(rates, base_rates), speedup)
