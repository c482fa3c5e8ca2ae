"""Medians, ratios and scaling laws, each with an interval.

All intervals are percentile bootstrap intervals (Efron and Tibshirani, "An Introduction to the
Bootstrap", 1993) at 95 %; of one value there is none. Resamples are seeded: a report made twice
holds the same numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

CONFIDENCE = 0.95
RESAMPLES = 9999
FIT_RESAMPLES = 500
SIZES_FOR_AMDAHL = 3  # one more than its parameters
SIZES_FOR_USL = 4
SIZES_TO_TRUST_USL = 6
NOTHING = 1e-6  # a parameter this near to its bound is at it
BAD_FIT = 0.1  # of a throughput

Throughputs = Mapping[int, Sequence[float]]  # of the repeats, by number of ranks


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; `low` and `high` are None where one value is all there is."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Fit:
    """A scaling law fitted to throughputs.

    Attributes:
        name: of the law.
        parameters: by name.
        warning: what limits its worth, empty if nothing does.
        describes: whether it is near what was measured, at every size.
    """

    name: str
    parameters: dict[str, Estimate]
    warning: str
    describes: bool = True

    def throughput(self, ranks: float) -> float:
        """Images a second that the law gives for so many ranks."""
        law = _LAWS[self.name][0]
        return float(law(ranks, *(item.value for item in self.parameters.values())))


def median(values: Sequence[float]) -> Estimate:
    """The median of repeats."""
    value = float(np.median(values))
    if len(values) < 2:
        return Estimate(value)
    found = stats.bootstrap((values,), np.median, **_SETTINGS, rng=np.random.default_rng(0))
    low, high = found.confidence_interval
    return Estimate(value, float(low), float(high))


def ratio(over: Sequence[float], under: Sequence[float]) -> Estimate:
    """The median of `over` divided by that of `under`, which are not paired."""
    value = float(np.median(over) / np.median(under))
    if min(len(over), len(under)) < 2:
        return Estimate(value)

    def statistic(first: NDArray[np.float64], second: NDArray[np.float64], axis: int) -> object:
        return np.median(first, axis=axis) / np.median(second, axis=axis)

    found = stats.bootstrap((over, under), statistic, **_SETTINGS, rng=np.random.default_rng(0))
    low, high = found.confidence_interval
    return Estimate(value, float(low), float(high))


def difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """The median of `first` less that of `second`, which are not paired."""
    value = float(np.median(first) - np.median(second))
    if min(len(first), len(second)) < 2:
        return Estimate(value)

    def statistic(one: NDArray[np.float64], other: NDArray[np.float64], axis: int) -> object:
        return np.median(one, axis=axis) - np.median(other, axis=axis)

    found = stats.bootstrap((first, second), statistic, **_SETTINGS, rng=np.random.default_rng(0))
    low, high = found.confidence_interval
    return Estimate(value, float(low), float(high))


_SETTINGS = {
    "confidence_level": CONFIDENCE,
    "n_resamples": RESAMPLES,
    "method": "percentile",
    "vectorized": True,
}


def amdahl(measured: Throughputs) -> Fit | None:
    """Amdahl's law (AFIPS 1967): X(N) = X(1) / (s + (1 - s) / N); None for too few sizes.

    Parameters: images_per_second, of one rank; serial_fraction, s.
    """
    return _fit("Amdahl", measured, SIZES_FOR_AMDAHL)


def usl(measured: Throughputs) -> Fit | None:
    """The Universal Scalability Law (Gunther 2007); None for too few sizes.

    X(N) = g N / (1 + a (N - 1) + b N (N - 1)). Parameters: images_per_second, g;
    contention, a; coherency, b.
    """
    return _fit("USL", measured, SIZES_FOR_USL)


def usl_peak(fit: Fit) -> float | None:
    """The number of ranks beyond which throughput falls; None if none is known."""
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
    farthest = max(abs(fit.throughput(n) / np.median(seen) - 1) for n, seen in measured.items())
    warning = _warning(fit, measured, has_repeats, farthest)
    return replace(fit, warning=warning, describes=bool(farthest <= BAD_FIT))


def _least_squares(
    law: Callable[..., NDArray[np.float64]], parameters: int, measured: Throughputs
) -> NDArray[np.float64]:
    """Least squares of relative errors, since throughputs differ by the number of ranks."""
    ranks = np.array([n for n, values in measured.items() for _ in values], float)
    seen = np.array([value for values in measured.values() for value in values], float)
    scale = seen[ranks.argmin()] / ranks.min()
    start = [1.0, *[0.05] * (parameters - 1)]
    upper = [np.inf, *[1.0] * (parameters - 1)]
    found, _ = optimize.curve_fit(
        law, ranks, seen / scale, start, sigma=seen / scale, bounds=([0.0] * parameters, upper)
    )
    found[0] *= scale
    return np.asarray(found)


def _resample(measured: Throughputs, generator: np.random.Generator) -> Throughputs:
    return {n: list(generator.choice(values, len(values))) for n, values in measured.items()}


def _warning(fit: Fit, measured: Throughputs, has_repeats: bool, farthest: float) -> str:
    """What limits the worth of a fit, which is off by the part `farthest` at a size."""
    found = []
    if farthest > BAD_FIT:
        found.append(f"it is {farthest:.0%} off at a size, so it does not describe these runs")
    for name, item in list(fit.parameters.items())[1:]:
        if not NOTHING < item.value < 1 - NOTHING:
            found.append(f"{name.replace('_', ' ')} is at its bound")
    if fit.name == "USL" and len(measured) < SIZES_TO_TRUST_USL:
        found.append(f"{len(measured)} sizes barely carry three parameters")
    if not has_repeats:
        found.append("without repeats of each size there is no interval")
    coherency = fit.parameters.get("coherency")
    if coherency is not None and (coherency.low or 0.0) <= NOTHING:
        found.append("coherency may be nothing, so the peak is not known")
    return "; ".join(found)
