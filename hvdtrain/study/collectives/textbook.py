"""Textbooks' counts of an all-reduce, fitted to measurements, and crossovers of algorithms.

The model is Hockney's (Parallel Computing 20(3), 1994): a message of s bytes takes alpha + beta s
seconds. Each all-reduce has an overhead besides, such as Horovod's cycle. Messages and bytes are
counted as by Thakur et al. ("Optimization of Collective Communication Operations in MPICH", IJHPCA
19(1), 2005): those that follow one after another until the last rank has the sum.
Additions are part of beta.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
from scipy import optimize

from hvdtrain.planner.network import Curve, Line

Seconds = Mapping[int, Sequence[float]]  # of the repeats, by bytes
DIFFERENT = 0.05  # a smaller relative difference of two medians counts as none
FEWEST_SIZES = 2  # on each side of a crossover


class Network(NamedTuple):
    """Seconds that an all-reduce costs in any case, per message, and per byte of a message."""

    overhead: float
    alpha: float
    beta: float


class Counts(NamedTuple):
    """Work of an all-reduce of n bytes on the longest path.

    Attributes:
        messages: number of messages.
        volume: bytes of these messages, divided by n.
    """

    messages: int
    volume: float

    def seconds(self, network: Network, size: float) -> float:
        """Return the seconds for `size` bytes."""
        sending = self.messages * network.alpha + self.volume * network.beta * size
        return network.overhead + sending


def counts(algorithm: str, ranks: int) -> Counts | None:
    """Return the textbook's counts; None for an algorithm that the library chooses by itself.

    Recursive doubling and Rabenseifner's algorithm first fold a number of ranks that is not a
    power of two: two more messages of the whole tensor.
    """
    rounds = int(math.log2(ranks))
    fold = 0 if 2**rounds == ranks else 2
    match algorithm:
        case "ring":
            return Counts(2 * (ranks - 1), 2 * (ranks - 1) / ranks)
        case "recursive-doubling":
            return Counts(rounds + fold, rounds + fold)
        case "rabenseifner":
            return Counts(2 * rounds + fold, 2 * (1 - 0.5**rounds) + fold)
        case "tree":
            depth = math.ceil(math.log2(ranks))
            return Counts(2 * depth, 2 * depth)
    return None


def medians(seconds: Seconds) -> dict[int, float]:
    """Return the median of the repeats by bytes, ascending."""
    return {size: median(values) for size, values in sorted(seconds.items())}


def fitted_line(seconds: Mapping[int, float]) -> Line:
    """Return latency and seconds per byte: the line with the smallest relative error."""
    return Curve(tuple((float(size), value) for size, value in sorted(seconds.items()))).line


def fitted_network(measured: Mapping[str, Mapping[int, float]], ranks: int) -> Network | None:
    """Return the network that explains all algorithms of a group together.

    It has the smallest relative error, and nothing in it is below 0.

    Args:
        measured: seconds by bytes, by algorithm.

    Returns:
        None without an algorithm that the textbook counts.
    """
    rows = [
        (1 / seconds, work.messages / seconds, work.volume * size / seconds)
        for algorithm, by_size in measured.items()
        if (work := counts(algorithm, ranks)) is not None
        for size, seconds in by_size.items()
    ]
    if not rows:
        return None
    columns = np.array(rows)
    scale = columns.max(axis=0)
    fitted, _ = optimize.nnls(columns / scale, np.ones(len(rows)))
    return Network(*(float(value) for value in fitted / scale))


@dataclass(frozen=True)
class Crossing:
    """The size at which one algorithm becomes faster than another.

    Attributes:
        below, above: the faster algorithm for smaller and for larger sizes, the same one if it is
            always faster; both are empty if there is no difference.
        size: in bytes; None if there is no crossover.
        between: the largest size at which `below` is clearly faster, and the smallest at which
            `above` is; None for a prediction.
    """

    below: str = ""
    above: str = ""
    size: float | None = None
    between: tuple[int, int] | None = None


def predicted_crossing(one: str, other: str, ranks: int, network: Network) -> Crossing:
    """Return where the textbook's seconds of two algorithms that it counts cross."""
    first, second = counts(one, ranks), counts(other, ranks)
    assert first is not None and second is not None
    fixed = (first.messages - second.messages) * network.alpha
    slope = (first.volume - second.volume) * network.beta
    if not fixed and not slope:
        return Crossing()
    below = one if (fixed or slope) < 0 else other
    above = one if (slope or fixed) < 0 else other
    return Crossing(below, above, -fixed / slope if below != above else None)


def measured_crossing(one: str, other: str, measured: Mapping[str, Seconds]) -> Crossing:
    """Return where the measured seconds of two algorithms cross.

    A size counts if the repeats of the two do not overlap and their medians differ by more than
    `DIFFERENT`. The crossover leaves the fewest sizes on the wrong sides, so that a disturbed size
    does not move it, and at least `FEWEST_SIZES` on each side. It is interpolated in logarithms.
    """
    clear = {
        size: ratio
        for size in sorted(measured[one].keys() & measured[other].keys())
        if (ratio := _clear_ratio(measured[one][size], measured[other][size]))
    }
    sizes, ratios = list(clear), list(clear.values())
    if len(sizes) < FEWEST_SIZES:
        return Crossing()
    # (sizes on the wrong sides and their difference, whether there is a crossover, its place,
    # sign below it)
    options = [
        (_wrong(ratios, place, sign), place > 0, place, sign)
        for place in (0, *range(FEWEST_SIZES, len(sizes) - FEWEST_SIZES + 1))
        for sign in (-1, 1)
    ]
    _, crosses, place, sign = min(options)
    names = {-1: one, 1: other}  # a logarithm below 0: the first one is faster
    if not crosses:
        return Crossing(names[-sign], names[-sign])
    (low, before), (high, after) = ((sizes[k], ratios[k]) for k in _edges(ratios, place, sign))
    part = before / (before - after)
    size = math.exp(math.log(low) + part * math.log(high / low))
    return Crossing(names[sign], names[-sign], size, (low, high))


def _clear_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the logarithm of the ratio of two medians; 0 if noise may explain it."""
    if min(one) <= max(other) and min(other) <= max(one):
        return 0.0
    ratio = median(one) / median(other)
    return math.log(ratio) if max(ratio, 1 / ratio) > 1 + DIFFERENT else 0.0


def _wrong(ratios: Sequence[float], place: int, sign: int) -> tuple[int, float]:
    """Return the number of ratios without `sign` below `place` or -`sign` above, and their sum."""
    wrong = [abs(ratio) for ratio in ratios[:place] if ratio * sign < 0]
    wrong += [abs(ratio) for ratio in ratios[place:] if ratio * sign > 0]
    return len(wrong), sum(wrong)


def _edges(ratios: Sequence[float], place: int, sign: int) -> tuple[int, int]:
    """Return the places next to a crossover whose ratios have the signs of their sides."""
    last = max(k for k in range(place) if ratios[k] * sign > 0)
    return last, min(k for k in range(place, len(ratios)) if ratios[k] * sign < 0)


def worst_error(predicted: Mapping[int, float], seconds: Mapping[int, float]) -> float:
    """Return the largest factor between predicted and measured seconds, at least 1."""
    ratios = [predicted[size] / value for size, value in seconds.items()]
    return max(max(ratio, 1 / ratio) for ratio in ratios)


def size_name(size: float) -> str:
    """Return a number of bytes in words."""
    for unit, bytes_ in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}"
    return f"{size:.0f} B"
