"""Divides a model over ranks by dynamic programming: exact for an estimate of the step time.

Components keep the order of the model and ranks theirs. Each stage is a run of components on a run
of ranks. For stage s, w_s is the time of one micro-batch (forward and backward), a_s the time
until its input has arrived, and y_s the rest of its step (all-reduce and update). The estimate for
a step of m micro-batches is

    sum of (w_s + a_s) + max over s of ((m - 1) w_s + y_s):

the first micro-batch passes through all stages, then the slowest stage sets the pace. Alpa (Zheng
et al., OSDI 2022, equation 2) minimises the same without y_s by trying all values of the maximum.
Here the interval of possible values is bisected, best first.

Many components or ranks are divided in groups of neighbours. The boundaries are then refined: they
move one at a time, as long as the estimate falls.
"""

import copy
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.plan.plan import Plan, Stage
from hvdtrain.plan.schedule import most_in_flight
from hvdtrain.planner.agreement import NONE
from hvdtrain.planner.cost import Question
from hvdtrain.planner.memory import BUFFERS, activation_bytes, lasting_bytes

UNFIT = math.inf
ALIKE = 1.2  # measurements of equal ranks differ by up to this factor on a shared machine
MOST_UNITS = 16  # groups of neighbouring ranks that a division distinguishes
MOST_PARTS = 48  # groups of neighbouring components that a division distinguishes
MOST_ROUNDS = 20  # of moving the boundaries
SPREAD = 1.03  # a division whose estimate exceeds the best by this factor will not win
TOLERANCE = 1e-3  # part of an estimate: far below the error of the measurements
EPSILON = 1e-14


class Run(NamedTuple):
    """Components [start, stop) on ranks [first, first + number)."""

    start: int
    stop: int
    first: int
    number: int


class Division(NamedTuple):
    """Runs that cover all components and all ranks, and the estimated seconds per step."""

    runs: tuple[Run, ...]
    seconds: float


class Times(NamedTuple):
    """Times and bytes of every run of components on one run of ranks: fp64 [start, stop].

    Attributes:
        passing: w + a: seconds of one micro-batch; UNFIT where start >= stop.
        pace: (m - 1) w + y: seconds per step without the first micro-batch.
        bytes: bytes that the fullest rank holds permanently.
        flight_bytes: bytes that it holds for one micro-batch in flight.
    """

    passing: np.ndarray
    pace: np.ndarray
    bytes: np.ndarray
    flight_bytes: np.ndarray


class Limit(NamedTuple):
    """The memory of a rank.

    Attributes:
        bytes: that a rank may hold.
        in_flight: returns the micro-batches that a stage holds, by the number of stages from
            itself to the end.
    """

    bytes: float
    in_flight: Callable[[int], int]

    def allows(self, times: Times, stages: int) -> np.ndarray:
        """Return which runs fit if `stages` stages, including this one, are left to the end."""
        held = times.bytes + self.in_flight(stages) * times.flight_bytes
        return np.asarray(held <= self.bytes)


def divide(
    components: int,
    ranks: int,
    times_of: Callable[[int, int], Times],
    limit: Limit | None = None,
    tolerance: float = 0.0,
    better_than: float = math.inf,
) -> Division | None:
    """Return the division with the smallest estimate; None if nothing fits or none is good enough.

    A division whose maximum is at least `low`, and whose sum is at least the smallest one with a
    maximum below `high`, cannot be better than these two together. Intervals that cannot contain a
    better division than the best known one are skipped.

    Args:
        times_of: returns the times of a run of ranks, given the first and their number; runs that
            are alike may share a result.
        limit: None if memory is not limited.
        tolerance: by how much the estimate may exceed the smallest, as a part of it.
        better_than: divisions with a larger estimate are not of interest.
    """
    search = _Search(components, ranks, times_of, limit)
    low, first = search.smallest_maximum(), search.smallest_sum(UNFIT)
    if first is None:
        return None
    runs, total, high = first
    best = Division(runs, total + high)
    intervals = [(total + low, low, high, total)]  # (bound, low, high, smallest sum below high)
    while intervals:
        bound, low, high, total = heapq.heappop(intervals)
        if bound >= min(best.seconds * (1 - tolerance), better_than):
            break
        if high - low <= EPSILON * high:
            continue
        middle = low + (high - low) / 2
        heapq.heappush(intervals, (total + middle, middle, high, total))
        below = search.smallest_sum(middle)
        if below is not None:
            runs, total, maximum = below
            best = min(best, Division(runs, total + maximum), key=lambda one: one.seconds)
            if maximum > low:
                heapq.heappush(intervals, (total + low, low, maximum, total))
    return best if best.seconds <= better_than else None


class _Search:
    """Dynamic programmes whose state is (rank, component), from the last state to the first.

    The value of a state is the best result of dividing the components from this one on over the
    ranks from this one on. One stage leads from a state to another one behind it in both. How many
    stages follow matters for memory only: with a limit, states with s stages are in slot s;
    without one, all are in slot 0.
    """

    def __init__(
        self,
        components: int,
        ranks: int,
        times_of: Callable[[int, int], Times],
        limit: Limit | None,
    ) -> None:
        self.components, self.ranks, self.limit = components, ranks, limit
        # Times of runs of 1, 2, ... ranks, by their first rank: fp64 [start, ranks - 1, stop].
        self.tables: list[Times] = []
        before: list[Times] = []
        for first in range(ranks):
            runs = [times_of(first, count) for count in range(1, ranks - first + 1)]
            if before and all(a is b for a, b in zip(runs, before, strict=False)):
                shared = self.tables[-1]  # large tables are made once for ranks that are alike
                self.tables.append(Times(*(array[:, : len(runs)] for array in shared)))
                continue
            before = runs
            self.tables.append(Times(*(np.stack(one, axis=1) for one in zip(*runs, strict=True))))
        # (slot, slot of the stages behind, first rank): what can be behind a stage comes before.
        self.order = [(0, 0, first) for first in reversed(range(ranks))]
        if limit is not None:
            self.order = [
                (depth, depth - 1, first)
                for depth in range(1, ranks + 1)
                for first in range(ranks - depth + 1)
            ]
        # Values of the states: fp64 [slots, ranks + 1, components + 1].
        slots = 1 if limit is None else ranks + 1
        self.empty = np.full((slots, ranks + 1, components + 1), UNFIT)
        self.empty[0, ranks, components] = 0.0

    def smallest_maximum(self) -> float:
        """Return the smallest pace that a division can have."""
        best = self.empty.copy()
        for slot, tail, first in self.order:
            pace = np.where(self._fits(first, slot), self.tables[first].pace, UNFIT)
            best[slot, first] = np.maximum(pace, best[tail, first + 1 :]).min(axis=(1, 2))
        return float(best[:, 0, 0].min())

    def smallest_sum(self, below: float) -> tuple[tuple[Run, ...], float, float] | None:
        """Return the division with the smallest sum among those with a pace less than `below`.

        The result has its runs, its sum and its maximum; it is None if there is no division.
        """
        best, starts = self.empty.copy(), np.arange(self.components + 1)
        choice = np.zeros(best.shape, np.int64)  # (ranks - 1, stop) as one number
        for slot, tail, first in self.order:
            times = self.tables[first]
            allowed = (times.pace < below) & self._fits(first, slot)
            whole = np.where(allowed, times.passing + best[tail, first + 1 :], UNFIT)
            whole = whole.reshape(len(starts), -1)
            choice[slot, first] = whole.argmin(axis=1)
            best[slot, first] = whole[starts, choice[slot, first]]
        slot = int(np.argmin(best[:, 0, 0]))
        total, maximum = float(best[slot, 0, 0]), 0.0
        if not math.isfinite(total):
            return None
        runs: list[Run] = []
        first = start = 0
        while first < self.ranks:
            more, stop = divmod(int(choice[slot, first, start]), self.components + 1)
            maximum = max(maximum, float(self.tables[first].pace[start, more, stop]))
            runs.append(Run(start, stop, first, more + 1))
            first, start = first + more + 1, stop
            slot -= self.limit is not None
        return tuple(runs), total, maximum

    def _fits(self, first: int, slot: int) -> "np.ndarray | bool":
        return self.limit is None or self.limit.allows(self.tables[first], slot)


class Tables:
    """Times of runs for one number of micro-batches; runs of equal ranks share them.

    Args:
        places: places between components where runs may start and end, 0 before the first one; all
            by default. Runs are then numbered by these places.
    """

    def __init__(
        self, question: Question, microbatches: int, places: Sequence[int] | None = None
    ) -> None:
        self.question, self.known = question, question.known
        self.microbatches = microbatches
        self.rows = self.most_rows = -(-question.batch_size // microbatches)
        costs = self.known.costs
        self.places = np.arange(len(costs) + 1) if places is None else np.asarray(places)
        self.norms = self._spans([cost.batch_norms for cost in costs])
        # Bytes of one sample; the last component sends nothing.
        crossing = np.array([0, *(cost.output_bytes for cost in costs[:-1]), 0], float)
        self.crossing = crossing[self.places]
        # A stage cannot end with a component whose output has no gradient, such as integers.
        ends = np.array([True, *(cost.is_differentiable for cost in costs[:-1]), True])
        valid = (self.places[:, None] < self.places[None, :]) & ends[self.places]
        self.receives = valid & (self.crossing > 0)[:, None]
        self.unfit = np.where(valid, 0.0, UNFIT)
        self.times: dict[tuple[object, ...], Times] = {}
        self.arrays: dict[tuple[object, ...], np.ndarray] = {}  # that several of the times need

    def with_microbatches(self, microbatches: int) -> "Tables":
        """Return the tables for as many or more micro-batches, which share what they can."""
        other = copy.copy(self)
        other.microbatches, other.times = microbatches, {}
        other.rows = -(-self.question.batch_size // microbatches)
        return other

    def times_of(self, first: int, count: int) -> Times:
        """Return the times of one run of ranks, as `divide` needs them."""
        ranks, hosts = tuple(range(first, first + count)), self.known.network.hosts
        # A rank of the stage before or behind sends to this one.
        sender = first - 1 if first else min(count, self.question.ranks - 1)
        key = (
            *(id(self.known.profile.ranks[rank]) for rank in ranks),
            len({hosts[rank] for rank in ranks}),
            hosts[sender] == hosts[first],
        )
        if key not in self.times:
            self.times[key] = self._make(ranks, sender, key)
        return self.times[key]

    def _make(self, ranks: tuple[int, ...], sender: int, key: tuple[object, ...]) -> Times:
        profile, (*_, hosts, is_near) = self.known.profile.ranks, key
        shares = shares_of(self.question, ranks, self.rows)
        rows = [-(-self.rows * share // sum(shares)) for share in shares]  # the most in a cut
        # Of ranks that are alike, the one with the most samples counts.
        unlike = {
            id(profile[rank]): (rank, count)
            for count, rank in sorted(zip(rows, ranks, strict=True))
        }.values()
        working = _slowest([self._done(rank)[count] for rank, count in unlike])
        if gather_seconds := self.known.gather_seconds(ranks):
            working = working + 2 * gather_seconds * self.norms  # in the forward and the backward
        latency, transfers = 0.0, self.unfit
        if sender not in ranks:
            latency = self.known.latency_seconds(sender, ranks[0])
            message = max(profile[rank].message_seconds for rank in ranks) - latency
            transfers = self._kept(
                *("transfers", max(rows), message, latency, hosts, is_near),
                make=lambda: self._transfers(sender, ranks[0], max(rows), message),
            )
        working = working + transfers
        rest = self._kept("rest", *key, make=lambda: self._rest(ranks, hosts))
        lasting = in_flight = np.zeros((1, 1))
        if self.question.limits is not None:
            lasting, in_flight = self._bytes(ranks, max(rows))
        return Times(
            # The latencies of the input and of its gradient count once; the rank works meanwhile.
            working + 2 * latency * self.receives,
            (self.microbatches - 1) * working + rest if self.microbatches > 1 else rest,
            lasting,
            in_flight,
        )

    def _done(self, rank: int) -> np.ndarray:
        """Return the seconds of one micro-batch up to each place: fp64 [most rows + 1, places].

        Row n is of n samples; that of 0 samples is not used.
        """
        times, rows = self.known.profile.ranks[rank], np.arange(self.most_rows + 1)

        def make() -> np.ndarray:
            forwards = 1.0 + self.known.is_recomputed
            return self._sums(
                times.arrays.forward.of(rows) * forwards + times.arrays.backward.of(rows)
            )

        return self._kept("done", id(times), make=make)

    def _transfers(self, sender: int, receiver: int, rows: int, message: float) -> np.ndarray:
        """Return the seconds of sending and receiving by run.

        Receiving activations at the start and gradients at the end does not overlap.
        """
        sizes = self.crossing * rows
        moving = self._between(sizes, lambda size: self.known.send_seconds(sender, receiver, size))
        seconds = np.where(sizes > 0, message + moving, 0.0)
        transfers: np.ndarray = seconds[:, None] + seconds[None, :] + self.unfit
        return transfers

    def _rest(self, ranks: tuple[int, ...], hosts: object) -> np.ndarray:
        """Return y: the seconds per step besides the micro-batches."""
        profile, agreement, count = self.known.profile.ranks, self.known.agreement, len(ranks)
        unlike = {id(profile[rank]): profile[rank] for rank in ranks}.values()
        updates = _slowest([self._sums(times.arrays.update) for times in unlike])
        if count == 1:
            return updates + self.unfit

        def make() -> np.ndarray:
            return self._between(
                self._spans(self.known.load_bytes(count)),
                lambda size: self.known.network.reduce_seconds(ranks, size),
            )

        reduced = self._kept("reduced", count, hosts, make=make)
        if agreement.compress != NONE:
            coding = [
                self._spans(
                    [sum(agreement.coding(one.coding)) for one in times.components.values()]
                )
                for times in unlike
            ]
            reduced = reduced + np.max(coding, axis=0)
        rest: np.ndarray = reduced / (agreement.period or 1) + updates + self.unfit
        return rest

    def _bytes(self, ranks: tuple[int, ...], rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the lasting bytes of the fullest rank, and those of a micro-batch in flight."""
        costs, optimizer, count = self.known.costs, self.question.optimizer, len(ranks)
        lasting = self._kept(
            *("lasting", count),
            make=lambda: self._spans([lasting_bytes([cost], optimizer, count) for cost in costs]),
        )
        recomputed = self.known.recomputed
        activations = self._kept(
            *("activations", rows),
            make=lambda: self._spans([activation_bytes([c], rows, recomputed) for c in costs]),
        )
        factor = max(self.known.profile.ranks[rank].activation_factor for rank in ranks)
        buffers = rows * BUFFERS * (self.crossing[:, None] + self.crossing[None, :])
        return lasting + buffers, activations * factor + rows * self.crossing[:, None]

    def _kept(self, *key: object, make: Callable[[], np.ndarray]) -> np.ndarray:
        if key not in self.arrays:
            self.arrays[key] = make()
        return self.arrays[key]

    def _between(self, sizes: np.ndarray, seconds: Callable[[float], float]) -> np.ndarray:
        """Return the seconds of each size, 0 for size 0.

        A network is linear between its breakpoints, so only these are evaluated.
        """
        largest = float(sizes.max())
        least = float(np.min(sizes, where=sizes > 0, initial=largest))
        inner = (size for size in self.known.network.breakpoints if least < size < largest)
        points = sorted({least, largest, *inner})
        return np.where(
            sizes > 0, np.interp(sizes, points, [seconds(size) for size in points]), 0.0
        )

    def _spans(self, values: Sequence[float]) -> np.ndarray:
        """Return the sums over runs: fp64, by places [start, stop); 0 if not start < stop."""
        sums = self._sums(np.asarray(values, np.float64))
        spans: np.ndarray = np.maximum(sums[None, :] - sums[:, None], 0.0)
        return spans

    def _sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sums of all components before each place, along the last axis."""
        sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
        np.cumsum(values, axis=-1, out=sums[..., 1:])
        at_places: np.ndarray = sums[..., self.places]
        return at_places


def _slowest(sums: Sequence[np.ndarray]) -> np.ndarray:
    """Return the seconds of each run of components on the slowest rank: fp64 [start, stop].

    Where not start < stop, there is no run, and the value means nothing.

    Args:
        sums: by rank, the seconds up to each place: fp64 [places].
    """
    done = np.array(sums)
    seconds: np.ndarray = (done[:, None, :] - done[:, :, None]).max(axis=0)
    return seconds


def shares_of(question: Question, ranks: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Return the shares of `rows` samples with which unequal ranks finish together.

    The next sample always goes to the rank that would finish it first. Ranks that are alike get
    equal shares.
    """
    if question.keeps is not None:
        return (1,) * len(ranks)  # unequal shares would change the groups of batch norm
    slowness = [question.known.profile.slowness[rank] for rank in ranks]
    if max(slowness) / min(slowness) < ALIKE:
        return (1,) * len(ranks)
    # What each rank has surely finished when the last sample starts; an idle rank would not show
    # its speed.
    least = (rows - len(ranks)) / sum(1 / slow for slow in slowness)
    counts = [max(int(rows >= len(ranks)), math.floor(least / slow)) for slow in slowness]
    done_at = [
        ((count + 1) * slow, k)
        for k, (count, slow) in enumerate(zip(counts, slowness, strict=True))
    ]
    heapq.heapify(done_at)
    for _ in range(rows - sum(counts)):
        _, best = done_at[0]
        counts[best] += 1
        heapq.heapreplace(done_at, ((counts[best] + 1) * slowness[best], best))
    return tuple(counts)


def divisions(
    question: Question, schedule: str, numbers: Sequence[int], most: int
) -> Iterator[Plan]:
    """Yield the plans with the best estimates, at most one per number of micro-batches.

    Args:
        numbers: of micro-batches; those that are best most often first: they rule out others.
        most: plans.
    """
    best: list[tuple[float, int, Division]] = []
    tables = Tables(question, min(numbers, default=1), places_of(question))
    for number in numbers:
        better_than = SPREAD * min((entry[0] for entry in best), default=UNFIT)
        division = divided(tables.with_microbatches(number), schedule, better_than)
        if division is not None:
            best.append((division.seconds, number, division))
    for _, number, division in sorted(best, key=lambda entry: entry[0])[:most]:
        if len(division.runs) < 2:
            continue
        stages = []
        for run in refined_division(question, schedule, number, division).runs:
            ranks = tuple(range(run.first, run.first + run.number))
            shares = shares_of(question, ranks, -(-question.batch_size // number))
            names = question.known.profile.names[run.start : run.stop]
            stages.append(Stage(tuple(names), ranks, shares))
        yield Plan(tuple(stages), number, schedule)


def divided(tables: Tables, schedule: str, better_than: float) -> Division | None:
    """Return the best division for one schedule and number of micro-batches.

    Its boundaries are at the places of the tables, see `places_of`, and between groups of
    neighbouring ranks, see `division_at`.
    """
    question, microbatches = tables.question, tables.microbatches
    limit = limit_of(question, schedule, microbatches)
    division = division_at(tables, None, better_than)
    if division is None or limit is None:
        return division
    # If the best division without a limit fits, it is also the best one with the limit.
    runs, fits = division.runs, True
    for left, run in zip(range(len(runs), 0, -1), runs, strict=True):
        start, stop = np.searchsorted(tables.places, run[:2])
        fits &= limit.allows(tables.times_of(run.first, run.number), left)[start, stop]
    if fits:
        return division
    division = division_at(tables, limit, better_than)
    if division is None and len(tables.places) <= len(question.known.costs):
        division = division_at(Tables(question, microbatches), limit, better_than)
    return division


def division_at(tables: Tables, limit: Limit | None, better_than: float) -> Division | None:
    """Return the best division with boundaries at the places of the tables."""
    places, ranks = tables.places.tolist(), tables.question.ranks
    unit = next(n for n in range(1, ranks + 1) if not ranks % n and ranks // n <= MOST_UNITS)
    division = divide(
        components=len(places) - 1,
        ranks=ranks // unit,
        times_of=lambda first, number: tables.times_of(unit * first, unit * number),
        limit=limit,
        tolerance=TOLERANCE,
        better_than=better_than,
    )
    if division is None:
        return None
    runs = tuple(
        Run(places[run.start], places[run.stop], unit * run.first, unit * run.number)
        for run in division.runs
    )
    return Division(runs, division.seconds)


def refined_division(
    question: Question, schedule: str, microbatches: int, division: Division
) -> Division:
    """Return a division that moving one boundary to any place cannot improve."""
    if len(places_of(question)) > len(question.known.costs):
        return division  # the boundaries were at the best of all places already
    tables, limit = Tables(question, microbatches), limit_of(question, schedule, microbatches)
    runs, stages = division.runs, []
    for left, run in zip(range(len(runs), 0, -1), runs, strict=True):
        times = tables.times_of(run.first, run.number)
        pace = (
            times.pace if limit is None else np.where(limit.allows(times, left), times.pace, UNFIT)
        )
        stages.append((times.passing, pace))
    cuts = [runs[0].start, *(run.stop for run in runs)]
    for _ in range(MOST_ROUNDS):
        before = list(cuts)
        for place in range(1, len(runs)):
            left, right = cuts[place - 1], cuts[place + 1]
            (passing, pace), (passing_behind, pace_behind) = stages[place - 1 : place + 1]
            paces = np.maximum(pace[left, :], pace_behind[:, right])
            for number, (_, other) in enumerate(stages):
                if number not in (place - 1, place):
                    paces = np.maximum(paces, other[cuts[number], cuts[number + 1]])
            estimates = passing[left, :] + passing_behind[:, right] + paces
            best = int(np.argmin(estimates))
            if estimates[best] < estimates[cuts[place]]:
                cuts[place] = best
        if cuts == before:
            break
    moved = tuple(
        run._replace(start=start, stop=stop)
        for run, start, stop in zip(runs, cuts, cuts[1:], strict=False)
    )
    total = sum(float(one[run[:2]]) for (one, _), run in zip(stages, moved, strict=True))
    worst = max(float(pace[run[:2]]) for (_, pace), run in zip(stages, moved, strict=True))
    return Division(moved, total + worst)


def limit_of(question: Question, schedule: str, microbatches: int) -> Limit | None:
    """Return the limit of what every rank has left for the model, if memory is limited.

    Under zb-h1 a stage may hold as many micro-batches as there are stages before it, too. Their
    number is not known while a division is made, so they are not counted here; the simulated step
    of the division counts them.
    """
    if question.limits is None:
        return None
    resident = [rank.resident_bytes for rank in question.known.profile.ranks]
    spare = min(limit - held for limit, held in zip(question.limits, resident, strict=True))
    return Limit(spare, lambda stages: most_in_flight(schedule, stages, 0, microbatches))


def places_of(question: Question) -> list[int]:
    """Return the places between components where a division may cut.

    These are all places if there are few components.
    """
    components = len(question.known.costs)
    if components <= MOST_PARTS:
        return list(range(components + 1))
    times = question.known.profile.ranks[0].arrays
    rows = question.batch_size // question.ranks or 1
    done = np.cumsum(times.forward(rows) + times.backward(rows))
    targets = done[-1] * np.arange(1, MOST_PARTS) / MOST_PARTS
    return sorted({0, components, *(int(np.argmin(abs(done - part))) + 1 for part in targets)})
