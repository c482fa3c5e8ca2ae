"""Seconds of something by its size, as measured: straight between points, and never falling."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np


class Line(NamedTuple):
    """Seconds of a size: `fixed + size * each`; alpha and beta of a message."""

    fixed: float
    each: float


@dataclass(frozen=True)
class Curve:
    """A piecewise linear function through (size, seconds), sizes ascending.

    Below the first point and beyond the last it goes on as the neighbouring piece does; a unit of
    a size below the first point takes no less than one of that point.
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, sizes: Iterable[float], seconds: Iterable[float]) -> "Curve":
        """Through measured points; one that is above a larger size's was disturbed: it is lowered.

        As Alpa (Zheng et al., OSDI 2022) cleans up its measured bandwidths.
        """
        pairs = sorted(zip(sizes, seconds, strict=True))
        lowered = np.minimum.accumulate([seconds for _, seconds in pairs[::-1]])[::-1]
        return cls(tuple((float(s), float(t)) for (s, _), t in zip(pairs, lowered, strict=True)))

    @classmethod
    def straight(cls, line: Line, largest: float = 1.0) -> "Curve":
        """A line."""
        return cls(((0.0, line.fixed), (largest, line.fixed + largest * line.each)))

    def __call__(self, size: float) -> float:
        """Seconds of one size."""
        points = self.points
        if len(points) == 1:
            return points[0][1] * (size / points[0][0] if points[0][0] else 1.0)
        behind = min(max(1, bisect_right(points, (size, math.inf))), len(points) - 1)
        (x0, y0), (x1, y1) = points[behind - 1], points[behind]
        seconds = y0 + (size - x0) * (y1 - y0) / (x1 - x0)
        return max(seconds, y0 * size / x0 if x0 else 0.0) if size < points[0][0] else seconds

    @cached_property
    def line(self) -> Line:
        """The line that is closest to the points, by relative error; neither part is negative."""
        x, y = self._arrays
        if len(x) == 1:
            return Line(0.0, y[0] / x[0]) if x[0] else Line(float(y[0]), 0.0)
        weights = 1 / np.maximum(y, 1e-12)
        columns = np.stack([np.ones_like(x), x], axis=1) * weights[:, None]
        fixed, each = np.linalg.lstsq(columns, y * weights, rcond=None)[0]
        if fixed < 0:
            ratios = x / np.maximum(y, 1e-12)
            return Line(0.0, float(ratios.sum() / (ratios**2).sum()))
        return Line(float(fixed), float(max(0.0, each)))

    @cached_property
    def least_each(self) -> float:
        """The fewest seconds that one unit of size takes, at whatever measured size."""
        x, y = self._arrays
        rates = [seconds / size for size, seconds in zip(x, y, strict=True) if size > 0]
        if len(x) > 1:  # beyond the last point a unit takes the last piece's slope, in the limit
            rates.append((y[-1] - y[-2]) / (x[-1] - x[-2]))
        return float(min(rates))

    def times(self, factor: float) -> "Curve":
        """The same on something so many times as slow."""
        return Curve(tuple((size, factor * seconds) for size, seconds in self.points))

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        sizes, seconds = zip(*self.points, strict=True)
        return np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)


def stacked(curves: Sequence[Curve]) -> Callable[[float], np.ndarray]:
    """What gives the seconds of all curves for one size at once: fp64 [curves].

    As each curve does by itself; quickly, where they have the same sizes.
    """
    sizes = curves[0]._arrays[0]
    has_same = all(len(each.points) == len(sizes) for each in curves)
    points = np.array([each.points for each in curves]) if has_same else np.zeros(0)
    if len(sizes) == 1 or not has_same or (points[:, :, 0] != sizes).any():
        return lambda size: np.array([each(size) for each in curves])
    seconds = points[:, :, 1]
    slopes = np.diff(seconds) / np.diff(sizes)

    def evaluate(size: float) -> np.ndarray:
        piece = int(np.clip(np.searchsorted(sizes, size, "right") - 1, 0, len(sizes) - 2))
        found: np.ndarray = seconds[:, piece] + (size - sizes[piece]) * slopes[:, piece]
        return np.maximum(found, seconds[:, 0] / sizes[0] * size) if size < sizes[0] else found

    return evaluate
