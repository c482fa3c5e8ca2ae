"""Seconds per message and per all-reduce between ranks, as functions of the size."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np


class Line(NamedTuple):
    """Seconds of a size as `fixed + size * per_unit`: alpha and beta of a message."""

    fixed: float
    per_unit: float


@dataclass(frozen=True)
class Curve:
    """A piecewise linear function through (size, seconds), sizes ascending.

    Below the first point and beyond the last one it continues the neighbouring piece. Below the
    first point a unit of size never takes less than it does at that point.
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, sizes: Iterable[float], seconds: Iterable[float]) -> "Curve":
        """Return the curve through measured points.

        A point above that of a larger size was disturbed and is lowered to it, as Alpa (Zheng et
        al., OSDI 2022) cleans up its measured bandwidths.
        """
        pairs = sorted(zip(sizes, seconds, strict=True))
        lowered = np.minimum.accumulate([seconds for _, seconds in pairs[::-1]])[::-1]
        return cls(tuple((float(s), float(t)) for (s, _), t in zip(pairs, lowered, strict=True)))

    @classmethod
    def straight(cls, line: Line, largest: float = 1.0) -> "Curve":
        """Return a straight line as a curve."""
        return cls(((0.0, line.fixed), (largest, line.fixed + largest * line.per_unit)))

    def __call__(self, size: float) -> float:
        """Return the seconds of one size."""
        points = self.points
        if len(points) == 1:
            return points[0][1] * (size / points[0][0] if points[0][0] else 1.0)
        right = min(max(1, bisect_right(points, (size, math.inf))), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        seconds = y0 + (size - x0) * (y1 - y0) / (x1 - x0)
        return max(seconds, y0 * size / x0 if x0 else 0.0) if size < points[0][0] else seconds

    @cached_property
    def line(self) -> Line:
        """Return the line with the smallest relative error to the points.

        Both of its parts are at least 0.
        """
        x, y = self._arrays
        if len(x) == 1:
            return Line(0.0, y[0] / x[0]) if x[0] else Line(float(y[0]), 0.0)
        weights = 1 / np.maximum(y, 1e-12)
        columns = np.stack([np.ones_like(x), x], axis=1) * weights[:, None]
        fixed, slope = np.linalg.lstsq(columns, y * weights, rcond=None)[0]
        if fixed < 0:
            ratios = x / np.maximum(y, 1e-12)
            return Line(0.0, float(ratios.sum() / (ratios**2).sum()))
        return Line(float(fixed), float(max(0.0, slope)))

    @cached_property
    def least_per_unit(self) -> float:
        """Return the fewest seconds that one unit of size takes, at any measured size."""
        x, y = self._arrays
        rates = [seconds / size for size, seconds in zip(x, y, strict=True) if size > 0]
        if len(x) > 1:  # far beyond the last point a unit takes the slope of the last piece
            rates.append((y[-1] - y[-2]) / (x[-1] - x[-2]))
        return float(min(rates))

    def times(self, factor: float) -> "Curve":
        """Return the curve for something that is `factor` times slower."""
        return Curve(tuple((size, factor * seconds) for size, seconds in self.points))

    def as_lists(self) -> list[list[float]]:
        """Return the points as JSON."""
        return [list(point) for point in self.points]

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        sizes, seconds = zip(*self.points, strict=True)
        return np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)


class Stacked:
    """Several curves at one size at a time; faster than each curve if all have the same sizes."""

    def __init__(self, curves: Sequence[Curve]) -> None:
        self.curves = curves
        sizes = curves[0]._arrays[0]
        has_same = all(len(curve.points) == len(sizes) for curve in curves)
        points = np.array([curve.points for curve in curves]) if has_same else np.zeros(0)
        self.is_alike = len(sizes) > 1 and has_same and not (points[:, :, 0] != sizes).any()
        if self.is_alike:
            self.sizes, self.seconds = sizes, points[:, :, 1]
            self.slopes = np.diff(self.seconds) / np.diff(sizes)

    def __call__(self, size: float) -> np.ndarray:
        """Return the seconds of one size: fp64 [curves], the values of calling each curve."""
        of_size: np.ndarray = self.of(np.array([size]))[0]
        return of_size

    def of(self, sizes: np.ndarray) -> np.ndarray:
        """Return the seconds of several sizes: fp64 [sizes, curves]; see `__call__`."""
        if not self.is_alike:
            return np.array([[curve(size) for curve in self.curves] for size in sizes.tolist()])
        known, seconds = self.sizes, self.seconds
        pieces = np.clip(np.searchsorted(known, sizes, "right") - 1, 0, len(known) - 2)
        more = (sizes - known[pieces])[:, None]
        values = seconds.T[pieces] + more * self.slopes.T[pieces]
        is_below = (sizes < known[0])[:, None]
        least = (seconds[:, 0] / known[0])[None, :] * sizes[:, None] if known[0] else values
        result: np.ndarray = np.where(is_below, np.maximum(values, least), values)
        return result

    @property
    def least_per_unit(self) -> np.ndarray:
        """Return `Curve.least_per_unit` of each curve: fp64 [curves]."""
        if not self.is_alike:
            return np.array([curve.least_per_unit for curve in self.curves])
        positive = self.sizes > 0
        rates = self.seconds[:, positive] / self.sizes[positive]
        least: np.ndarray = np.minimum(rates.min(axis=1), self.slopes[:, -1])
        return least


class Contention(NamedTuple):
    """Slowdown of computing and of an all-reduce when both run at the same time, at least 1.

    Galvatron (Miao et al., VLDB 2023) reports that predictions are off by 15 % without it.
    """

    compute: float = 1.0
    reduce: float = 1.0


FREE = Contention()
SLOW_LINK = 2.0  # a link is slow if it is this many times slower than others of its kind


class Network(Protocol):
    """Interface of a network for predictions."""

    @property
    def contention(self) -> Contention:
        """Return the slowdown of computing and all-reduces that run at the same time."""

    @property
    def hosts(self) -> Sequence[str]:
        """Return the host of each rank."""

    @property
    def has_unlike_links(self) -> bool:
        """Return whether links differ though they are on as many hosts."""

    @property
    def breakpoints(self) -> Sequence[float]:
        """Return the sizes in bytes between which seconds are linear, but for slow links."""

    def reduce_seconds(self, ranks: Sequence[int], size: float) -> float:
        """Return the seconds of an all-reduce of `size` bytes over `ranks`."""

    def send_seconds(self, sender: int, receiver: int, size: float) -> float:
        """Return the seconds from a send of `size` bytes to their arrival."""


@dataclass(frozen=True)
class MeasuredNetwork:
    """A network that was measured on the ranks of a job.

    Attributes:
        hosts: the host of each rank.
        all_reduce: seconds by bytes, by number of ranks; the first key is whether they are on
            several hosts.
        hand_over: seconds by bytes; the key is whether the two ranks are on different hosts.
        slow_links: those of a pair of ranks, in ascending order, between which transfers take
            longer than between others, both ways.
    """

    hosts: tuple[str, ...]
    all_reduce: dict[bool, dict[int, Curve]] = field(default_factory=dict)
    hand_over: dict[bool, Curve] = field(default_factory=dict)
    contention: Contention = FREE
    slow_links: Mapping[tuple[int, int], Curve] = field(default_factory=dict)

    def scaled(self, factor: float, only: bool | None = None) -> "MeasuredNetwork":
        """Return a network that is `factor` times slower.

        Args:
            only: whether what crosses hosts is slower, or what does not; None: all.
        """
        factors = {
            crosses: factor if only in (None, crosses) else 1.0 for crosses in (True, False)
        }
        return replace(
            self,
            all_reduce={
                crosses: {number: c.times(factors[crosses]) for number, c in curves.items()}
                for crosses, curves in self.all_reduce.items()
            },
            hand_over={
                crosses: curve.times(factors[crosses]) for crosses, curve in self.hand_over.items()
            },
            slow_links={pair: c.times(factor) for pair, c in self.slow_links.items()},
        )

    def with_links(self, links: Mapping[tuple[int, int], Curve]) -> "MeasuredNetwork":
        """Return the network as its links are now: most as before, or all slower, some more.

        How slow a link is counts beside what was known of its kind; so links are all between
        hosts, or all within one. What differs little is noise.

        Args:
            links: seconds by bytes, for pairs of ranks in ascending order.
        """
        first = next(iter(links))
        crosses = self.hosts[first[0]] != self.hosts[first[1]]
        known = self.hand_over.get(crosses) or self.hand_over[not crosses]
        size = min(known.points[-1][0], max(curve.points[-1][0] for curve in links.values()))
        ratios = {pair: curve(size) / known(size) for pair, curve in links.items()}
        # A quarter of the links are no slower than that.
        usual = float(np.quantile(list(ratios.values()), 0.25, method="lower"))
        slow = {pair: links[pair] for pair, ratio in ratios.items() if ratio > SLOW_LINK * usual}
        others = replace(self, slow_links={})
        if not 1 / SLOW_LINK < usual < SLOW_LINK:
            others = others.scaled(usual, crosses)
        return replace(others, slow_links=slow)

    @property
    def has_unlike_links(self) -> bool:
        """Return whether some links are slower than others of their kind."""
        return bool(self.slow_links)

    @property
    def breakpoints(self) -> Sequence[float]:
        """Return all measured sizes, ascending."""
        curves = [curve for curves in self.all_reduce.values() for curve in curves.values()]
        curves += [*self.hand_over.values(), *self.slow_links.values()]
        return sorted({size for curve in curves for size, _ in curve.points})

    def reduce_seconds(self, ranks: Sequence[int], size: float) -> float:
        """Return the seconds of an all-reduce, interpolated between measured numbers of ranks.

        A slow link makes it as many times slower as a transfer of one rank's part of the bytes,
        if the two ranks are neighbours in the ring.
        """
        if len(ranks) < 2 or not size:
            return 0.0
        seconds = self._reduce_seconds(ranks, size)
        if not self.slow_links:
            return seconds
        part = size / len(ranks)
        ring = {(min(pair), max(pair)) for pair in pairwise((*ranks, ranks[0]))}
        slower = [
            self.slow_links[pair](part) / self._usual_seconds(*pair, part)
            for pair in ring & self.slow_links.keys()
        ]
        return seconds * max(1.0, *slower) if slower else seconds

    def _reduce_seconds(self, ranks: Sequence[int], size: float) -> float:
        crosses = len({self.hosts[rank] for rank in ranks}) > 1
        by_number = self.all_reduce.get(crosses) or self.all_reduce[not crosses]
        numbers = sorted(by_number)
        seconds = [by_number[number](size) for number in numbers]
        if len(numbers) == 1:
            return seconds[0]
        return Curve(tuple(zip(map(float, numbers), seconds, strict=True)))(len(ranks))

    def send_seconds(self, sender: int, receiver: int, size: float) -> float:
        """Return the seconds from a send of `size` bytes to their arrival."""
        if sender == receiver:
            return 0.0
        slow = self.slow_links.get((min(sender, receiver), max(sender, receiver)))
        return slow(size) if slow else self._usual_seconds(sender, receiver, size)

    def _usual_seconds(self, sender: int, receiver: int, size: float) -> float:
        crosses = self.hosts[sender] != self.hosts[receiver]
        return (self.hand_over.get(crosses) or self.hand_over[not crosses])(size)


@dataclass(frozen=True)
class FreeNetwork:
    """A network that takes no time."""

    hosts: Sequence[str]
    contention: Contention = FREE
    has_unlike_links: bool = False
    breakpoints: Sequence[float] = ()

    def reduce_seconds(self, ranks: Sequence[int], size: float) -> float:
        """Return 0."""
        return 0.0

    def send_seconds(self, sender: int, receiver: int, size: float) -> float:
        """Return 0."""
        return 0.0
