"""Medians of repeats with intervals, and scaling laws that are fitted to throughputs.

A law is fitted by least squares of the logarithms of the throughputs, as their noise is relative.
Intervals are for 95 %: Student's t with the linearised covariance. Laws are compared by F-tests
from the simplest on (Draper and Smith, "Applied Regression Analysis", 1998, chapters 2 and 6): a
law with one more parameter must reduce the residuals by more than noise would.

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
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

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


def growth(after: Sequence[Sequence[float]], before: Sequence[Sequence[float]]) -> Estimate:
    """Return a ratio (of the medians of two samples) divided by another one; all are positive."""
    over, under = (np.median(one) / np.median(two) for one, two in (after, before))
    return _of_logarithms(float(over / under), *(np.log(one) for one in (*after, *before)))


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
    from scipy import stats  # a third of a second, which most reports need not wait for

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
    return float(special.stdtrit(degrees, (1 + CONFIDENCE) / 2))


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


SIGNIFICANT = 0.05
MISFIT = 0.01  # a smaller p-value says that noise does not explain the residuals of a law
SMALL_MISFIT = 0.02  # relative error of a throughput that does not matter, however significant
BAD_FIT = 0.1  # relative error of a throughput, at any size
LEAST_SIZES = 3  # two sizes lie on a curve of any law
SIZES_TO_TRUST_USL = 6
NOTHING = 1e-6  # a parameter this near to its bound counts as at its bound
BEYOND = (2, 4)  # extrapolated sizes, in multiples of the largest one measured

Scaling = Literal["strong", "weak"]
Throughputs = Mapping[int, Sequence[float]]  # images/s of the repeats, by number of ranks
Vector = NDArray[np.float64]


def _linear(ranks: Vector) -> Vector:
    return ranks


def _amdahl(ranks: Vector, serial: float) -> Vector:
    return 1 / (serial + (1 - serial) / ranks)


def _gustafson(ranks: Vector, serial: float) -> Vector:
    return serial + (1 - serial) * ranks


def _usl(ranks: Vector, contention: float, coherency: float) -> Vector:
    return ranks / (1 + contention * (ranks - 1) + coherency * ranks * (ranks - 1))


# Speed-up over one rank by name, and the names of the parameters, which are 0 to 1.
_LAWS: dict[str, tuple[Callable[..., Vector], tuple[str, ...]]] = {
    "linear": (_linear, ()),
    "Amdahl": (_amdahl, ("serial_fraction",)),
    "Gustafson": (_gustafson, ("serial_fraction",)),
    "USL": (_usl, ("contention", "coherency")),
}
# By rising number of parameters. Amdahl's law (AFIPS 1967) is one of a problem of fixed size,
# Gustafson's (CACM 31, 1988) of one that grows. USL: Gunther, "Guerrilla Capacity Planning", 2007.
LAWS: dict[Scaling, tuple[str, ...]] = {
    "strong": ("linear", "Amdahl", "USL"),
    "weak": ("linear", "Gustafson", "USL"),
}


@dataclass(frozen=True)
class Fit:
    """A law fitted to throughputs.

    Attributes:
        name: name of the law.
        measured: the throughputs.
        one: images/s of one rank.
        values: parameters of the law by name.
    """

    name: str
    measured: Throughputs
    one: float
    values: dict[str, float]

    def throughput(self, ranks: float) -> float:
        """Return the images/s that the law predicts for a number of ranks."""
        return self.one * self.speedup(ranks)

    def speedup(self, ranks: float) -> float:
        """Return the speed-up over one rank that the law predicts."""
        return float(_LAWS[self.name][0](np.array(float(ranks)), *self.values.values()))

    @cached_property
    def misfits(self) -> dict[int, float]:
        """The relative error of the law against the mean throughput of each size."""
        return {
            ranks: self.throughput(ranks) / math.exp(float(np.mean(np.log(rates)))) - 1
            for ranks, rates in self.measured.items()
        }

    @cached_property
    def describes(self) -> bool:
        """Return whether noise explains the residuals, or they are small; not if one is large."""
        worst = max(map(abs, self.misfits.values()))
        return worst <= BAD_FIT and (not self.is_misfit or worst <= SMALL_MISFIT)

    @property
    def parameters(self) -> dict[str, Estimate]:
        """Images/s of one rank, and the parameters of the law."""
        values, halves = [math.log(self.one), *self.values.values()], None
        if (covariance := self.covariance) is not None:
            halves = self._t * np.sqrt(np.maximum(np.diag(covariance), 0.0))
        one, *others = (
            Estimate(value)
            if halves is None
            else Estimate(value, value - float(halves[place]), value + float(halves[place]))
            for place, value in enumerate(values)
        )
        known = {"images_per_second": one.through(math.exp)}
        return known | dict(zip(self.values, map(_clipped, others), strict=True))

    def predicted(self, ranks: float, over: float | None = None) -> Estimate:
        """Return the predicted images/s, or the speed-up over `over` ranks, with its interval."""
        slope = self._slope(ranks)
        value = self.throughput(ranks)
        if over is not None:
            slope, value = slope - self._slope(over), value / self.throughput(over)
        covariance = self.covariance
        is_fixed = over is not None and not self.values  # a linear law has no speed-up to fit
        if covariance is None or is_fixed:
            return Estimate(value)
        half = self._t * math.sqrt(max(float(slope @ covariance @ slope), 0.0))
        return Estimate(value, value * math.exp(-half), value * math.exp(half))

    def width(self, target: float, extra: int | None = None) -> float:
        """Return half the relative width of the interval at `target` ranks.

        Args:
            extra: number of ranks of one more run that is assumed.
        """
        slope = self._slope(target)
        spread = float(slope @ self._inverse(extra) @ slope)
        return math.expm1(self._t * math.sqrt(self._variance * max(spread, 0.0)))

    @cached_property
    def covariance(self) -> NDArray[np.float64] | None:
        """Covariance of the logarithm of `one` and of the parameters; None without repeats."""
        return self._variance * self._inverse() if self.has_repeats else None

    def _inverse(self, extra: int | None = None) -> NDArray[np.float64]:
        """Return the inverse of the squared slopes at all runs, and at one more if `extra` is."""
        sizes = [ranks for ranks, rates in self.measured.items() for _ in rates]
        rows = np.array([self._slope(ranks) for ranks in [*sizes, *([extra] if extra else [])]])
        return np.asarray(np.linalg.pinv(rows.T @ rows))

    @property
    def has_repeats(self) -> bool:
        """Return whether any size was measured several times, which shows the noise."""
        return max(map(len, self.measured.values())) > 1

    @property
    def is_misfit(self) -> bool:
        """Return whether the residuals are more than noise explains."""
        (noise, noise_degrees), (misfit, degrees) = self._noise, self._misfit()
        if noise_degrees < 1 or degrees < 1:
            return False
        return noise == 0 or float(special.fdtrc(degrees, noise_degrees, misfit / noise)) < MISFIT

    @property
    def residuals(self) -> float:
        """Sum of the squares of the logarithms' residuals."""
        return sum(
            math.log(rate / self.throughput(ranks)) ** 2
            for ranks, rates in self.measured.items()
            for rate in rates
        )

    @cached_property
    def _noise(self) -> tuple[float, int]:
        """Mean square of the noise of repeats, and its degrees of freedom."""
        logs = [np.log(rates) for rates in self.measured.values()]
        degrees = sum(map(len, logs)) - len(logs)
        return sum(float(((x - x.mean()) ** 2).sum()) for x in logs) / max(degrees, 1), degrees

    def _misfit(self) -> tuple[float, int]:
        """Mean square of what repeats do not explain, and its degrees of freedom."""
        noise, noise_degrees = self._noise
        degrees = len(self.measured) - 1 - len(self.values)
        return max(self.residuals - noise * noise_degrees, 0.0) / max(degrees, 1), degrees

    @cached_property
    def _variance_and_degrees(self) -> tuple[float, int]:
        """Variance of one throughput's logarithm, and its degrees of freedom.

        Sizes, not runs, are the independent observations of a law that does not describe them.
        """
        if self.is_misfit:
            return self._misfit()
        degrees = sum(map(len, self.measured.values())) - 1 - len(self.values)
        return self.residuals / max(degrees, 1), max(degrees, 1)

    @property
    def _variance(self) -> float:
        return self._variance_and_degrees[0]

    @property
    def _t(self) -> float:
        return t_quantile(self._variance_and_degrees[1])

    def _slope(self, ranks: float) -> Vector:
        """Return the derivatives of the logarithm of the throughput by the parameters."""
        law, values = _LAWS[self.name][0], list(self.values.values())
        at = np.array(float(ranks))
        slopes = [1.0]
        for place in range(len(values)):
            step = 1e-6
            higher, lower = list(values), list(values)
            higher[place], lower[place] = values[place] + step, max(values[place] - step, 0.0)
            change = math.log(float(law(at, *higher)) / float(law(at, *lower)))
            slopes.append(change / (higher[place] - lower[place]))
        return np.array(slopes)


@dataclass(frozen=True)
class Laws:
    """The laws that were fitted to a series.

    Attributes:
        fits: by rising number of parameters.
        law: the simplest one that no other law improves beyond noise; None if it does not
            describe the runs, or nothing is known of the noise.
    """

    fits: tuple[Fit, ...] = ()
    law: Fit | None = None


def compare(measured: Throughputs, scaling: Scaling) -> Laws:
    """Fit the laws of a kind of scaling, as far as there are enough sizes, and compare them.

    A law needs one more size than it has parameters, and at least three. Without repeats nothing
    is known of the noise, and no law is chosen.
    """
    fits: list[Fit] = []
    for name in LAWS[scaling]:
        if len(measured) >= max(LEAST_SIZES, len(_LAWS[name][1]) + 2):
            fits.append(_fit(name, measured))
    if not fits:
        return Laws()
    best = fits[0]
    if not best.has_repeats:
        return Laws(tuple(fits))
    for richer in fits[1:]:
        if _improves(richer, best):
            best = richer
    return Laws(tuple(fits), best if best.describes else None)


def serial_fraction(speedup: Estimate, ranks: int) -> Estimate:
    """Return the serial fraction that a speed-up shows (Karp and Flatt, CACM 33, 1990).

    It rises with the ranks if communication grows, and stays if a part of the work is serial.
    """
    return speedup.through(lambda value: (1 / value - 1 / ranks) / (1 - 1 / ranks))


def usl_peak(fit: Fit) -> float | None:
    """Return the number of ranks beyond which throughput falls, or None if it is unknown."""
    contention, coherency = fit.values["contention"], fit.values["coherency"]
    return math.sqrt(max(1 - contention, 0.0) / coherency) if coherency > NOTHING else None


def next_run(fit: Fit, target: float) -> tuple[int, float, float] | None:
    """Return the size whose next run would narrow the interval at `target` ranks most.

    Returns:
        The number of ranks, and half the relative width of the interval before and after; the
        smallest of several sizes that are as good. None without repeats.
    """
    if not fit.has_repeats:
        return None
    sizes = [*fit.measured, BEYOND[0] * max(fit.measured)]
    widths = {ranks: fit.width(target, ranks) for ranks in sizes}
    least = min(widths.values())
    ranks = min(size for size, width in widths.items() if width <= 1.001 * least)
    return ranks, fit.width(target), widths[ranks]


def cautions(fit: Fit) -> str:
    """Return the reasons not to rely on a fit, or an empty text."""
    reasons = []
    ranks = max(fit.misfits, key=lambda size: abs(fit.misfits[size]))
    if not fit.describes:
        reasons.append(
            f"it is {abs(fit.misfits[ranks]):.0%} off at {ranks} rank(s)"
            f"{', more than noise explains' if fit.is_misfit else ''}, so it does not describe "
            "these runs"
        )
    for name, value in fit.values.items():
        if not NOTHING < value < 1 - NOTHING:
            reasons.append(f"{name.replace('_', ' ')} is at its bound")
    if fit.name == "USL" and len(fit.measured) < SIZES_TO_TRUST_USL:
        reasons.append(f"{len(fit.measured)} sizes are hardly enough for three parameters")
    if not fit.has_repeats:
        reasons.append("without repeats there is no interval")
    coherency = fit.parameters.get("coherency")
    if coherency is not None and (coherency.low or 0.0) <= NOTHING:
        reasons.append("coherency may be zero, so the peak is unknown")
    return "; ".join(reasons)


def _fit(name: str, measured: Throughputs) -> Fit:
    from scipy import optimize  # slow to import

    law, names = _LAWS[name]
    ranks = np.array([n for n, rates in measured.items() for _ in rates], float)
    logs = np.log([rate for rates in measured.values() for rate in rates])

    def residuals(values: Vector) -> Vector:
        return np.asarray(values[0] + np.log(law(ranks, *values[1:])) - logs)

    start = [
        float(logs[ranks == ranks.min()].mean() - math.log(ranks.min())),
        *[0.05] * len(names),
    ]
    bounds = ([-np.inf, *[0.0] * len(names)], [np.inf, *[1.0] * len(names)])
    fitted = optimize.least_squares(
        residuals, start, bounds=bounds, x_scale=[1.0, *[0.1] * len(names)], xtol=1e-12, ftol=1e-12
    ).x
    # The search ends beside a bound, not at it.
    near = [0.0 if value < NOTHING else float(value) for value in fitted[1:]]
    values = dict(zip(names, near, strict=True))
    return Fit(name, measured, math.exp(float(fitted[0])), values)


def _improves(richer: Fit, simpler: Fit) -> bool:
    """Return whether more parameters reduce the residuals by more than noise would."""
    added = len(richer.values) - len(simpler.values)
    noise, degrees = richer._noise
    gain = (simpler.residuals - richer.residuals) / added
    if gain <= 0:
        return False
    return noise == 0 or float(special.fdtrc(added, degrees, gain / noise)) < SIGNIFICANT


def _clipped(estimate: Estimate) -> Estimate:
    """Return an estimate whose interval holds no value below 0 or above 1."""
    if estimate.low is None or estimate.high is None:
        return estimate
    return Estimate(estimate.value, max(estimate.low, 0.0), min(estimate.high, 1.0))
