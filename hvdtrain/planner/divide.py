"""Divides components over ranks by dynamic programming: exact for an estimate of the step time.

Components keep the order of the model and ranks theirs. Each stage is a run of components on a run
of ranks. For stage s, w_s is the time of one micro-batch (forward and backward), a_s the time
until its input has arrived, and y_s the rest of its step (all-reduce and update). The estimate for
a step of m micro-batches is

    sum of (w_s + a_s) + max over s of ((m - 1) w_s + y_s):

the first micro-batch passes through all stages, then the slowest stage sets the pace. Alpa (Zheng
et al., OSDI 2022, equation 2) minimises the same without y_s by trying all values of the maximum.
Here the interval of possible values is bisected, best first. A division whose maximum is at least
`low`, and whose sum is at least the smallest one with a maximum below `high`, cannot be better
than these two together. Intervals that cannot contain a better division than the best known one
are skipped.

A division of groups of components is refined afterwards: its boundaries move one at a time, as
long as the estimate falls.
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
    """Runs that cover all components and all ranks, and the estimated seconds per step."""

    runs: tuple[Run, ...]
    seconds: float


class Times(NamedTuple):
    """Times and bytes of every run of components on one run of ranks: fp64 [n + 1, n + 1].

    The indices are (start, stop) of the components.

    Attributes:
        passing: w: seconds of one micro-batch; UNFIT where start >= stop.
        rest: y: seconds per step that do not belong to a micro-batch.
        bytes: bytes that the fullest rank holds permanently.
        flight_bytes: bytes that it holds for one micro-batch in flight.
        arriving: a: seconds until the input, and its gradient, have arrived.
    """

    passing: np.ndarray
    rest: np.ndarray
    bytes: np.ndarray
    flight_bytes: np.ndarray
    arriving: "np.ndarray | float" = 0.0

    def paces(self, microbatches: int) -> np.ndarray:
        """Return the seconds per step of each run, without its first micro-batch."""
        return _paces(self.passing, self.rest, microbatches)


def _paces(passing: np.ndarray, rest: np.ndarray, microbatches: int) -> np.ndarray:
    if microbatches == 1:
        return np.where(np.isfinite(passing), rest, UNFIT)
    paces: np.ndarray = (microbatches - 1) * passing + rest
    return paces


TimesOf = Callable[[int, int], Times]  # arguments: first rank, number of ranks


@dataclass(frozen=True)
class Limit:
    """The memory of a rank.

    Attributes:
        bytes: that a rank may hold.
        in_flight: returns the micro-batches that a stage holds, by the number of stages from
            itself to the end.
    """

    bytes: float
    in_flight: Callable[[int], int]

    def allows(self, times: "Times | _Tables", stages: int) -> np.ndarray:
        """Return which runs fit if `stages` stages, including this one, are left to the end."""
        held = times.bytes + self.in_flight(stages) * times.flight_bytes
        return np.asarray(held <= self.bytes)


def divide(
    components: int,
    ranks: int,
    microbatches: int,
    times_of: TimesOf,
    limit: Limit | None = None,
    tolerance: float = 0.0,
    better_than: float = math.inf,
) -> Division | None:
    """Return the division with the smallest estimate; None if nothing fits or none is good enough.

    Args:
        times_of: called once for each run of ranks; runs that are alike may share a result.
        limit: None if memory is not limited.
        tolerance: by how much the estimate may exceed the smallest, as a part of it.
        better_than: divisions with a larger estimate are not of interest.
    """
    runs = [
        [times_of(first, count) for count in range(1, ranks - first + 1)] for first in range(ranks)
    ]
    tables = _stacked(runs, microbatches, is_limited=limit is not None)
    division = _Search(components, ranks, tables, limit).best(tolerance, better_than)
    return division if division is not None and division.seconds <= better_than else None


class _Scored(NamedTuple):
    """A division with its sum and its maximum."""

    total: float
    maximum: float
    runs: tuple[Run, ...]

    @property
    def division(self) -> Division:
        """Return the division with its estimate."""
        return Division(self.runs, self.total + self.maximum)


class _Tables(NamedTuple):
    """Times of runs of 1, 2, ... ranks that start at one rank: fp64 [start, ranks - 1, stop].

    Attributes:
        passing: w + a of `Times`.
        paces: result of `Times.paces`.
        bytes, flight_bytes: as in `Times`; only used if memory is limited.
    """

    passing: np.ndarray
    paces: np.ndarray
    bytes: np.ndarray
    flight_bytes: np.ndarray

    def up_to(self, ranks: int) -> "_Tables":
        """Return the tables of runs of at most `ranks` ranks, as views of the same memory."""
        return _Tables(*(array[:, :ranks] for array in self))


def _stacked(
    runs: Sequence[Sequence[Times]], microbatches: int, is_limited: bool
) -> list[_Tables]:
    """Return the tables by first rank; runs of ranks that are alike share their tables."""
    tables: list[_Tables] = []
    previous: Sequence[Times] = ()
    for rank_times in runs:
        if tables and all(one is other for one, other in zip(rank_times, previous, strict=False)):
            tables.append(tables[-1].up_to(len(rank_times)))
            continue
        previous, unlimited = rank_times, np.zeros((1, 1, 1))
        passing, rest = (
            np.stack([times[place] for times in rank_times], axis=1) for place in (0, 1)
        )
        arriving = [np.broadcast_to(times.arriving, times.passing.shape) for times in rank_times]
        tables.append(
            _Tables(
                passing + np.stack(arriving, axis=1),
                _paces(passing, rest, microbatches),
                np.stack([times.bytes for times in rank_times], axis=1)
                if is_limited
                else unlimited,
                np.stack([times.flight_bytes for times in rank_times], axis=1)
                if is_limited
                else unlimited,
            )
        )
    return tables


@dataclass
class _Search:
    """Searches for the best division.

    How many stages follow matters for memory only. Without a limit, one slot holds the best result
    from a rank and a component on; with a limit, slot s holds the best result in s stages.

    Attributes:
        tables: by first rank.
    """

    components: int
    ranks: int
    tables: list[_Tables]
    limit: Limit | None

    def best(self, tolerance: float, better_than: float) -> Division | None:
        """Return the division with the smallest estimate, up to `tolerance` and `better_than`."""
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
            scored = self.smallest_sum(middle)
            if scored is not None:
                best = min(best, scored.division, key=lambda division: division.seconds)
                if scored.maximum > low:
                    below = (scored.total + low, low, scored.maximum, scored.total)
                    heapq.heappush(intervals, below)
        return best

    def smallest_maximum(self) -> float:
        """Return the smallest pace that a division can have."""
        best = self._empty()
        for slot, tail, first in self._order():
            tables, behind = self.tables[first], best[tail, first + 1 :]
            paces = np.where(self._fits(tables, slot), tables.paces, UNFIT)
            best[slot, first] = np.maximum(paces, behind).min(axis=(1, 2))
        return float(best[:, 0, 0].min())

    def smallest_sum(self, below: float) -> _Scored | None:
        """Return the division with the smallest sum among those with a pace less than `below`."""
        best, starts = self._empty(), np.arange(self.components + 1)
        choice = np.zeros(best.shape, np.int64)  # (ranks - 1, stop) as one number
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
        return _Scored(float(best[slot, 0, 0]), pace, runs)

    def _empty(self) -> np.ndarray:
        """Return the array of best results from a rank and a component on.

        Its shape is [slots, ranks + 1, components + 1].
        """
        slots = 1 if self.limit is None else self.ranks + 1
        best = np.full((slots, self.ranks + 1, self.components + 1), UNFIT)
        best[0, self.ranks, self.components] = 0.0
        return best

    def _order(self) -> list[tuple[int, int, int]]:
        """Return (slot, slot of the stages behind, first rank) in the order of computation.

        What can be behind a stage comes before it.
        """
        if self.limit is None:
            return [(0, 0, first) for first in reversed(range(self.ranks))]
        depths = range(1, self.ranks + 1)
        return [
            (depth, depth - 1, first)
            for depth in depths
            for first in range(self.ranks - depth + 1)
        ]

    def _fits(self, tables: _Tables, slot: int) -> "np.ndarray | bool":
        return True if self.limit is None else self.limit.allows(tables, slot)

    def _runs(self, choice: np.ndarray, slot: int) -> tuple[Run, ...]:
        runs: list[Run] = []
        first = start = 0
        while first < self.ranks:
            more, stop = divmod(int(choice[slot, first, start]), self.components + 1)
            runs.append(Run(start, stop, first, more + 1))
            first, start = first + more + 1, stop
            slot -= self.limit is not None
        return tuple(runs)


MOST_ROUNDS = 20


def refined(
    runs: Sequence[Run], microbatches: int, times_of: TimesOf, limit: Limit | None
) -> tuple[Run, ...]:
    """Return a division over the same ranks that moving one boundary cannot improve."""
    cuts = [runs[0].start, *(run.stop for run in runs)]
    stages = []
    for number, run in enumerate(runs):
        times = times_of(run.first, run.number)
        pace = times.paces(microbatches)
        if limit is not None:
            pace = np.where(limit.allows(times, len(runs) - number), pace, UNFIT)
        stages.append(_Stage(times.passing + times.arriving, pace))
    for _ in range(MOST_ROUNDS):
        before = list(cuts)
        for place in range(1, len(cuts) - 1):
            cuts[place] = _best_place(stages, cuts, place)
        if cuts == before:
            break
    return tuple(
        run._replace(start=start, stop=stop)
        for run, start, stop in zip(runs, cuts, cuts[1:], strict=False)
    )


class _Stage(NamedTuple):
    """Seconds of every run of components on the ranks of one stage: fp64 [start, stop]."""

    whole: np.ndarray
    pace: np.ndarray


def _best_place(stages: Sequence[_Stage], cuts: Sequence[int], place: int) -> int:
    """Return the best place of one boundary if all others stay."""
    before, behind = stages[place - 1], stages[place]
    left, right = cuts[place - 1], cuts[place + 1]
    pace = np.maximum(before.pace[left, :], behind.pace[:, right])
    for number, stage in enumerate(stages):
        if number not in (place - 1, place):
            pace = np.maximum(pace, stage.pace[cuts[number], cuts[number + 1]])
    estimates = before.whole[left, :] + behind.whole[:, right] + pace
    best = int(np.argmin(estimates))
    return best if estimates[best] < estimates[cuts[place]] else cuts[place]
