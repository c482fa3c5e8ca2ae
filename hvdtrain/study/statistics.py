"""Medians, ratios and differences of repeats with intervals, an equivalence test, and tables.

All intervals are for 95 % and follow Student's t distribution, with the variance that the median
of a normal sample has; two samples are compared as by Welch (Biometrika 34, 1947). Positive
numbers (seconds, images/s, bytes) are taken on a logarithmic scale, as their noise is relative.
A percentile bootstrap of three to six repeats would hold the truth far too rarely. A single value
has no interval.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from hvdtrain.data.images import shown

CONFIDENCE = 0.95
# Variance of the median of N normal values over that of their mean, from N = 1; Hojo, Biometrika
# 23, 1931. Larger samples: an approximation.
MEDIAN_VARIANCE = (1.0, 1.0, 1.346, 1.193, 1.434, 1.288, 1.473, 1.345, 1.495)

# What means something to Markdown or HTML in a line, or at its start; a lone sign does not, nor
# an underscore within a word.
_MARKUP = re.compile(r"[&<>`*~|\\\[\]]|(?<!\w)_|_(?!\w)|^#|^[-+](?=[-+\s])")

Sample = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; `low` and `high` are None for a single value."""

    value: float
    low: float | None = None
    high: float | None = None

    def through(self, function: Callable[[float], float]) -> "Estimate":
        """Return the estimate of a monotonic function of this number."""
        if self.low is None or self.high is None:
            return Estimate(function(self.value))
        low, high = sorted((function(self.low), function(self.high)))
        return Estimate(function(self.value), low, high)


def median(values: Sequence[float]) -> Estimate:
    """Return the median of repeats.

    The interval does not go below zero unless a number is negative.
    """
    sample = np.asarray(values, float)
    middle = float(np.median(sample))
    if (sample > 0).all():
        return _of_logarithms(middle, np.log(sample))
    estimate = _estimate(middle, sample)
    if estimate.low is None or (sample < 0).any():
        return estimate
    return Estimate(estimate.value, max(estimate.low, 0.0), estimate.high)


def ratio(over: Sequence[float], under: Sequence[float]) -> Estimate:
    """Return the median of `over` divided by that of `under`; not paired, all are positive."""
    value = float(np.median(over)) / float(np.median(under))
    return _of_logarithms(value, np.log(over), np.log(under))


def difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return the median of `first` minus that of `second`; the samples are not paired."""
    value = float(np.median(first)) - float(np.median(second))
    return _estimate(value, np.asarray(first, float), np.asarray(second, float))


def equivalence(first: Sequence[float], second: Sequence[float], margin: float) -> float | None:
    """Return the p-value of the hypothesis that two means differ by `margin` or more.

    A small value shows that they are equivalent; a large one shows nothing. Source: Schuirmann's
    two one-sided tests (J. Pharmacokinet. Biopharm. 15, 1987), each Welch's t-test. None if a
    sample has fewer than two values.
    """
    if min(len(first), len(second)) < 2:
        return None
    one, other = np.asarray(first, float), np.asarray(second, float)
    if one.std() == other.std() == 0:  # without variance there is no t-test
        return 0.0 if abs(one[0] - other[0]) < margin else 1.0
    above = stats.ttest_ind(one + margin, other, equal_var=False, alternative="greater")
    below = stats.ttest_ind(one - margin, other, equal_var=False, alternative="less")
    return float(max(above.pvalue, below.pvalue))


def is_shown(p_value: float | None) -> bool:
    """Return whether a p-value shows an equivalence."""
    return p_value is not None and p_value < 1 - CONFIDENCE


def _of_logarithms(value: float, *samples: Sample) -> Estimate:
    """Return a positive median, or the ratio of two, with the interval of its logarithm."""
    interval = _estimate(math.log(value), *samples).through(math.exp)
    if interval.low is None or interval.high is None:
        return Estimate(value)
    # Equal repeats have an interval without width, beside which rounding may put the value.
    return Estimate(value, min(interval.low, value), max(interval.high, value))


def _estimate(value: float, *samples: Sample) -> Estimate:
    """Return the interval of a median, or of the sum or difference of the medians of samples."""
    if min(map(len, samples)) < 2:
        return Estimate(value)
    parts = [_variance(one) for one in samples]
    whole = sum(parts)
    if whole == 0:
        return Estimate(value, value, value)
    degrees = whole**2 / sum(
        part**2 / (len(one) - 1) for part, one in zip(parts, samples, strict=True)
    )
    half = t_quantile(degrees) * math.sqrt(whole)
    return Estimate(value, value - half, value + half)


def spread(values: Sequence[float]) -> float:
    """Return the standard error of the logarithm of a median; 0.0 for a single value."""
    return math.sqrt(_variance(np.log(values))) if len(values) > 1 else 0.0


def _variance(sample: Sample) -> float:
    """Return the variance of the median of a sample."""
    return _median_variance(len(sample)) * float(np.var(sample, ddof=1)) / len(sample)


def t_quantile(degrees: float) -> float:
    """Return how many standard errors lie between an estimate and an end of its interval."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees))


def _median_variance(count: int) -> float:
    """Return the variance of the median of normal values over that of their mean."""
    if count <= len(MEDIAN_VARIANCE):
        return MEDIAN_VARIANCE[count - 1]
    return math.pi / 2 * count / (count + (0.57 if count % 2 else 1.36))


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
