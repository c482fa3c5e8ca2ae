"""Medians, ratios and scaling laws, each with an interval, and a test of equivalence.

All intervals are percentile bootstrap intervals (Efron and Tibshirani, "An Introduction to the
Bootstrap", 1993) at 95 %; a single value has none. Resamples are seeded: a report made twice
holds the same numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

CONFIDENCE = 0.95
RESAMPLES = 9999
FIT_RESAMPLES = 500
SIZES_FOR_AMDAHL = 3  # one more than its parameters
SIZES_FOR_USL = 4
SIZES_TO_TRUST_USL = 6
NOTHING = 1e-6  # a parameter this near to its bound counts as at its bound
BAD_FIT = 0.1  # relative error of a throughput

Sample = NDArray[np.float64]
Throughputs = Mapping[int, Sequence[float]]  # images/s of the repeats, by number of ranks


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; `low` and `high` are None for a single value."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Fit:
    """A scaling law fitted to throughputs.

    Attributes:
        name: name of the law.
        parameters: fitted parameters by name.
        warning: reasons not to rely on the fit, or empty.
        describes: whether it is within `BAD_FIT` of the measured throughput at every size.
    """

    name: str
    parameters: dict[str, Estimate]
    warning: str
    describes: bool = True

    def throughput(self, ranks: float) -> float:
        """Return the images/s that the law predicts for a number of ranks."""
        law = _LAWS[self.name][0]
        return float(law(ranks, *(item.value for item in self.parameters.values())))


def median(values: Sequence[float]) -> Estimate:
    """Return the median of repeats."""
    return _estimate(np.median, values)


def ratio(over: Sequence[float], under: Sequence[float]) -> Estimate:
    """Return the median of `over` divided by that of `under`; the samples are not paired."""

    def statistic(first: Sample, second: Sample, axis: int) -> Any:
        return np.median(first, axis=axis) / np.median(second, axis=axis)

    return _estimate(statistic, over, under)


def difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return the median of `first` minus that of `second`; the samples are not paired."""

    def statistic(one: Sample, other: Sample, axis: int) -> Any:
        return np.median(one, axis=axis) - np.median(other, axis=axis)

    return _estimate(statistic, first, second)


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


def _estimate(statistic: Callable[..., Any], *samples: Sequence[float]) -> Estimate:
    """Return a statistic of samples, with an interval if each of them has several values."""
    value = float(statistic(*map(np.asarray, samples), axis=-1))
    if min(map(len, samples)) < 2:
        return Estimate(value)
    resampled = stats.bootstrap(
        samples,
        statistic,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    low, high = resampled.confidence_interval
    return Estimate(value, float(low), float(high))


def amdahl(measured: Throughputs) -> Fit | None:
    """Fit Amdahl's law (AFIPS 1967), X(N) = X(1) / (s + (1 - s) / N); None for too few sizes.

    The fitted parameters are images_per_second, X(1), and serial_fraction, s.
    """
    return _fit("Amdahl", measured, SIZES_FOR_AMDAHL)


def usl(measured: Throughputs) -> Fit | None:
    """Fit the Universal Scalability Law (Gunther 2007); None for too few sizes.

    X(N) = g N / (1 + a (N - 1) + b N (N - 1)). The fitted parameters are images_per_second, g,
    contention, a, and coherency, b.
    """
    return _fit("USL", measured, SIZES_FOR_USL)


def usl_peak(fit: Fit) -> float | None:
    """Return the number of ranks beyond which throughput falls, or None if it is unknown."""
    contention, coherency = (fit.parameters[name].value for name in ("contention", "coherency"))
    return float(np.sqrt((1 - contention) / coherency)) if coherency > NOTHING else None


def _amdahl(ranks: NDArray[np.float64], one: float, serial: float) -> NDArray[np.float64]:
    return one / (serial + (1 - serial) / ranks)


def _usl(
    ranks: NDArray[np.float64], one: float, contention: float, coherency: float
) -> NDArray[np.float64]:
    return one * ranks / (1 + contention * (ranks - 1) + coherency * ranks * (ranks - 1))


_LAWS: dict[str, tuple[Callable[..., NDArray[np.float64]], tuple[str, ...]]] = {
    "Amdahl": (_amdahl, ("images_per_second", "serial_fraction")),
    "USL": (_usl, ("images_per_second", "contention", "coherency")),
}


def _fit(name: str, measured: Throughputs, sizes_needed: int) -> Fit | None:
    if len(measured) < sizes_needed:
        return None
    law, names = _LAWS[name]
    best = _least_squares(law, len(names), measured)
    has_repeats = min(map(len, measured.values())) > 1
    resampled = np.array(
        [
            _least_squares(law, len(names), _resample(measured, generator))
            for generator in np.random.default_rng(0).spawn(FIT_RESAMPLES if has_repeats else 0)
        ]
    )
    tail = 100 * (1 - CONFIDENCE) / 2
    parameters = {}
    for place, parameter in enumerate(names):
        low, high = (
            np.percentile(resampled[:, place], [tail, 100 - tail]) if has_repeats else (None, None)
        )
        parameters[parameter] = Estimate(
            float(best[place]),
            None if low is None else float(low),
            None if high is None else float(high),
        )
    fit = Fit(name, parameters, "")
    worst = max(abs(fit.throughput(n) / np.median(rates) - 1) for n, rates in measured.items())
    warning = _warning(fit, measured, has_repeats, worst)
    return replace(fit, warning=warning, describes=bool(worst <= BAD_FIT))


def _least_squares(
    law: Callable[..., NDArray[np.float64]], parameters: int, measured: Throughputs
) -> NDArray[np.float64]:
    """Fit a law by least squares of relative errors, as throughputs grow with the ranks."""
    ranks = np.array([n for n, values in measured.items() for _ in values], float)
    rates = np.array([value for values in measured.values() for value in values], float)
    scale = rates[ranks.argmin()] / ranks.min()
    start = [1.0, *[0.05] * (parameters - 1)]
    upper = [np.inf, *[1.0] * (parameters - 1)]
    fitted, _ = optimize.curve_fit(
        law, ranks, rates / scale, start, sigma=rates / scale, bounds=([0.0] * parameters, upper)
    )
    fitted[0] *= scale
    return np.asarray(fitted)


def _resample(measured: Throughputs, generator: np.random.Generator) -> Throughputs:
    return {n: list(generator.choice(values, len(values))) for n, values in measured.items()}


def _warning(fit: Fit, measured: Throughputs, has_repeats: bool, worst: float) -> str:
    """Return the reasons not to rely on a fit whose worst relative error at a size is `worst`."""
    reasons = []
    if worst > BAD_FIT:
        reasons.append(f"it is {worst:.0%} off at one size, so it does not describe these runs")
    for name, item in list(fit.parameters.items())[1:]:
        if not NOTHING < item.value < 1 - NOTHING:
            reasons.append(f"{name.replace('_', ' ')} is at its bound")
    if fit.name == "USL" and len(measured) < SIZES_TO_TRUST_USL:
        reasons.append(f"{len(measured)} sizes are hardly enough for three parameters")
    if not has_repeats:
        reasons.append("without repeats of each size there is no interval")
    coherency = fit.parameters.get("coherency")
    if coherency is not None and (coherency.low or 0.0) <= NOTHING:
        reasons.append("coherency may be zero, so the peak is unknown")
    return "; ".join(reasons)
