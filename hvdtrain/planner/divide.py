"""Divides components over ranks: exact, by dynamic programming, for an estimate of the step.

Components stay in the order of the model and ranks in theirs; each stage is a run of components on
a run of ranks. With w_s the time of one micro-batch in stage s, forward and backward, a_s until
what it needs has arrived, and y_s what its step takes besides (reduction and update), the estimate
of a step of m micro-batches is

    sum of (w_s + a_s) + max over s of ((m - 1) w_s + y_s):

the first micro-batch passes all stages, and then the slowest of them sets the pace. Alpa (Zheng et
al., OSDI 2022, equation 2) minimises the same without y_s, trying out all values of the maximum.
Here the values are bisected, best first: a division whose maximum is at least `low`, and whose sum
is at least the smallest with a maximum below `high`, cannot be better than both together, and what
cannot be better than the best that is known is never looked at.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

UNFIT = math.inf
EPSILON = 1e-14


class Run(NamedTuple):
    """Components [start, stop) on ranks [first, first + number)."""

    start: int
    stop: int
    first: int
    number: int


@dataclass(frozen=True)
class Division:
    """Runs that cover all components and all ranks, and the estimate of a step."""

    runs: tuple[Run, ...]
    seconds: float


class Times(NamedTuple):
    """Of every run of components on one run of ranks: fp64 [n + 1, n + 1], by (start, stop).

    Attributes:
        passing: w: seconds of one micro-batch; UNFIT where start >= stop.
        arriving: a: seconds until its input, and its gradient, are there.
        besides: y: seconds of a step that no micro-batch takes.
        bytes: that the fullest rank holds for good; and of those of one micro-batch in flight.
    """

    passing: np.ndarray
    besides: np.ndarray
    bytes: np.ndarray
    flight_bytes: np.ndarray
    arriving: "np.ndarray | float" = 0.0

    def paces(self, microbatches: int) -> np.ndarray:
        """Of each run: all micro-batches but the first, and what a step takes besides."""
        possible = np.isfinite(self.passing)
        passing = np.where(possible, self.passing, 0.0)
        return np.where(possible, (microbatches - 1) * passing + self.besides, UNFIT)

    def fits(self, limit: float, in_flight: int) -> np.ndarray:
        """Which runs fit where so many micro-batches are in flight."""
        return np.asarray(self.bytes + in_flight * self.flight_bytes <= limit)


TimesOf = Callable[[int, int], Times]  # of (first rank, number of ranks)


def divide(
    components: int,
    ranks: int,
    microbatches: int,
    times_of: TimesOf,
    limit: float | None = None,
    tolerance: float = 0.0,
    better_than: float = math.inf,
) -> Division | None:
    """The division with the smallest estimate; None if nothing fits or none is good enough.

    Args:
        times_of: called once for each run of ranks; runs that are alike may share a result.
        limit: bytes that a rank may hold. With s stages from a stage to the end it holds
            min(s, m) micro-batches, as under 1F1B.
        tolerance: how much larger the estimate may be, as a part of the smallest; 0 for none.
        better_than: an estimate that a division must not exceed to be of interest.
    """
    tables = {
        (first, count): times_of(first, count)
        for first in range(ranks)
        for count in range(1, ranks - first + 1)
    }
    found = _Search(components, ranks, microbatches, tables, limit).best(tolerance, better_than)
    return found if found is not None and found.seconds <= better_than else None


class _Found(NamedTuple):
    """A division: its sum, its maximum, its runs."""

    total: float
    maximum: float
    runs: tuple[Run, ...]

    @property
    def division(self) -> Division:
        """The same with its estimate."""
        return Division(self.runs, self.total + self.maximum)


@dataclass
class _Search:
    components: int
    ranks: int
    microbatches: int
    tables: dict[tuple[int, int], Times]
    limit: float | None

    def __post_init__(self) -> None:
        # How many stages follow matters to memory alone.
        self.depths = self.ranks if self.limit is not None else 1
        self.paces = {key: each.paces(self.microbatches) for key, each in self.tables.items()}

    def best(self, tolerance: float, better_than: float) -> Division | None:
        """The division with the smallest estimate, or one that is not better than is wanted."""
        least, first = self.smallest_maximum(), self.smallest_sum(UNFIT)
        if first is None:
            return None
        best = first.division
        # (bound, low, high, total): divisions with low <= maximum < high, whose sum is >= total.
        intervals = [(first.total + least, least, first.maximum, first.total)]
        while intervals:
            bound, low, high, total = heapq.heappop(intervals)
            if bound >= min(best.seconds * (1 - tolerance), better_than):
                break
            if high - low <= EPSILON * high:
                continue
            middle = low + (high - low) / 2
            heapq.heappush(intervals, (total + middle, middle, high, total))
            found = self.smallest_sum(middle)
            if found is not None:
                best = min(best, found.division, key=lambda each: each.seconds)
                if found.maximum > low:
                    below = (found.total + low, low, found.maximum, found.total)
                    heapq.heappush(intervals, below)
        return best

    def _fits(self, key: tuple[int, int], depth: int) -> "np.ndarray | bool":
        """Which runs fit where `depth` stages, itself included, are left to the end."""
        if self.limit is None:
            return True
        return self.tables[key].fits(self.limit, min(depth, self.microbatches))

    def smallest_maximum(self) -> float:
        """The smallest pace that any division can have."""
        best = self._empty()
        for depth, first, count, tail in self._order():
            key = first, count
            pace = np.where(self._fits(key, depth), self.paces[key], UNFIT)
            behind = best[tail, first + count]
            found = np.maximum(pace, behind[None, :]).min(axis=1)
            place = best[self._slot(depth), first]
            np.minimum(place, found, out=place)
        return float(best[:, 0, 0].min())

    def smallest_sum(self, below: float) -> _Found | None:
        """The division of the smallest sum among those with a pace below that."""
        n = self.components
        best = self._empty()
        choice = np.full((*best.shape, 2), -1, np.int32)  # (stop, count)
        for depth, first, count, tail in self._order():
            key = first, count
            allowed = (self.paces[key] < below) & self._fits(key, depth)
            each = self.tables[key]
            passing = np.where(allowed, each.passing + each.arriving, UNFIT)
            whole = passing + best[tail, first + count][None, :]
            stops = whole.argmin(axis=1)
            found = whole[np.arange(n + 1), stops]
            slot = self._slot(depth)
            better = found < best[slot, first]
            best[slot, first][better] = found[better]
            choice[slot, first][better] = np.stack([stops, np.full(n + 1, count)], axis=1)[better]
        slot = int(np.argmin(best[:, 0, 0]))
        if not np.isfinite(best[slot, 0, 0]):
            return None
        runs = self._runs(choice, slot)
        pace = max(float(self.paces[run.first, run.number][run.start, run.stop]) for run in runs)
        return _Found(float(best[slot, 0, 0]), pace, runs)

    def _empty(self) -> np.ndarray:
        """[depths + 1, ranks + 1, components + 1]: of what is left from a rank and a component."""
        best = np.full((self.depths + 1, self.ranks + 1, self.components + 1), UNFIT)
        best[0, self.ranks, self.components] = 0.0
        return best

    def _slot(self, depth: int) -> int:
        return depth if self.limit is not None else 1

    def _order(self) -> "list[tuple[int, int, int, int]]":
        """(depth, first rank, number of ranks, slot of what is behind), each after its tails."""
        found = []
        for first in reversed(range(self.ranks)):
            for count in range(1, self.ranks - first + 1):
                is_end = first + count == self.ranks
                if is_end:
                    found.append((1, first, count, 0))
                elif self.limit is None:
                    found.append((1, first, count, 1))
                else:
                    left = self.ranks - first - count
                    found += [(depth, first, count, depth - 1) for depth in range(2, left + 2)]
        return found

    def _runs(self, choice: np.ndarray, slot: int) -> tuple[Run, ...]:
        runs: list[Run] = []
        first = start = 0
        while first < self.ranks:
            stop, count = (int(value) for value in choice[slot, first, start])
            runs.append(Run(start, stop, first, count))
            first, start = first + count, stop
            if self.limit is not None:
                slot -= 1
        return tuple(runs)
