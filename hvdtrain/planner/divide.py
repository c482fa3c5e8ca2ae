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
from collections.abc import Callable, Sequence
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
    runs = [
        [times_of(first, count) for count in range(1, ranks - first + 1)] for first in range(ranks)
    ]
    tables = _stacked(runs, microbatches, is_limited=limit is not None)
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


class _Tables(NamedTuple):
    """Of runs of one rank, of two, and so on, from a rank on: fp64 [start, ranks - 1, stop]."""

    passing: np.ndarray  # and arriving
    paces: np.ndarray
    bytes: np.ndarray  # these two where memory is limited
    flight_bytes: np.ndarray

    def up_to(self, ranks: int) -> "_Tables":
        """Of runs of so many ranks at most, in the same memory."""
        return _Tables(*(each[:, :ranks] for each in self))


def _stacked(
    runs: Sequence[Sequence[Times]], microbatches: int, is_limited: bool
) -> list[_Tables]:
    """By the first rank; where runs of ranks are alike, so is what is made of them."""
    found: list[_Tables] = []
    made: Sequence[Times] = ()
    for each in runs:
        if found and all(one is other for one, other in zip(each, made, strict=False)):
            found.append(found[-1].up_to(len(each)))
            continue
        made, nothing = each, np.zeros((1, 1, 1))
        found.append(
            _Tables(
                np.stack([times.passing + times.arriving for times in each], axis=1),
                np.stack([times.paces(microbatches) for times in each], axis=1),
                np.stack([times.bytes for times in each], axis=1) if is_limited else nothing,
                np.stack([times.flight_bytes for times in each], axis=1)
                if is_limited
                else nothing,
            )
        )
    return found


@dataclass
class _Search:
    """`tables` are by the first rank.

    How many stages follow matters to memory alone: without a limit, one slot holds what is best
    from a rank and a component on; with one, slot s holds the best in s stages.
    """

    components: int
    ranks: int
    microbatches: int
    tables: list[_Tables]
    limit: float | None

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

    def smallest_maximum(self) -> float:
        """The smallest pace that any division can have."""
        best = self._empty()
        for slot, tail, first in self._order():
            tables, behind = self.tables[first], best[tail, first + 1 :]
            paces = np.where(self._fits(tables, slot), tables.paces, UNFIT)
            best[slot, first] = np.maximum(paces, behind).min(axis=(1, 2))
        return float(best[:, 0, 0].min())

    def smallest_sum(self, below: float) -> _Found | None:
        """The division of the smallest sum among those with a pace below that."""
        best, starts = self._empty(), np.arange(self.components + 1)
        choice = np.zeros(best.shape, np.int64)  # of (ranks - 1, stop), as one number
        for slot, tail, first in self._order():
            tables, behind = self.tables[first], best[tail, first + 1 :]
            allowed = (tables.paces < below) & self._fits(tables, slot)
            whole = np.where(allowed, tables.passing + behind, UNFIT).reshape(len(starts), -1)
            choice[slot, first] = whole.argmin(axis=1)
            best[slot, first] = whole[starts, choice[slot, first]]
        slot = int(np.argmin(best[:, 0, 0]))
        if not np.isfinite(best[slot, 0, 0]):
            return None
        runs = self._runs(choice, slot)
        pace = max(
            float(self.tables[run.first].paces[run.start, run.number - 1, run.stop])
            for run in runs
        )
        return _Found(float(best[slot, 0, 0]), pace, runs)

    def _empty(self) -> np.ndarray:
        """[slots, ranks + 1, components + 1]: of what is left from a rank and a component."""
        slots = 1 if self.limit is None else self.ranks + 1
        best = np.full((slots, self.ranks + 1, self.components + 1), UNFIT)
        best[0, self.ranks, self.components] = 0.0
        return best

    def _order(self) -> list[tuple[int, int, int]]:
        """(slot, slot of what is behind, first rank), each after what can be behind it."""
        if self.limit is None:
            return [(0, 0, first) for first in reversed(range(self.ranks))]
        depths = range(1, self.ranks + 1)
        return [
            (depth, depth - 1, first)
            for depth in depths
            for first in range(self.ranks - depth + 1)
        ]

    def _fits(self, tables: _Tables, slot: int) -> "np.ndarray | bool":
        """Which runs fit where so many stages, itself included, are left to the end."""
        if self.limit is None:
            return True
        in_flight = min(slot, self.microbatches)
        return np.asarray(tables.bytes + in_flight * tables.flight_bytes <= self.limit)

    def _runs(self, choice: np.ndarray, slot: int) -> tuple[Run, ...]:
        runs: list[Run] = []
        first = start = 0
        while first < self.ranks:
            more, stop = divmod(int(choice[slot, first, start]), self.components + 1)
            runs.append(Run(start, stop, first, more + 1))
            first, start = first + more + 1, stop
            slot -= self.limit is not None
        return tuple(runs)
