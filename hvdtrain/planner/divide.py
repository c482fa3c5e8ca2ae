"""Divides a model over ranks by dynamic programming: exact for an estimate of the step time.

Components keep the order of the model and ranks theirs. Each stage is a run of components on a run
of ranks. For stage s, w_s is the time of one micro-batch (forward and backward), a_s the time
until its input has arrived, and y_s the rest of its step (all-reduce and update). The estimate for
a step of m micro-batches is

    sum of (w_s + a_s) + max over s of ((m - 1) w_s + y_s):

the first micro-batch passes through all stages, then the slowest stage sets the pace. Alpa (Zheng
et al., OSDI 2022, equation 2) minimises the same without y_s by trying all values of the maximum.
Here the interval of possible values is bisected, best first.

Many components or ranks are divided in groups of neighbours. The boundaries between components are
then refined: the groups of ranks stay, and all places are allowed.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.plan.plan import Plan, Stage
from hvdtrain.plan.schedule import most_in_flight
from hvdtrain.planner.agreement import NONE
from hvdtrain.planner.cost import Question
from hvdtrain.planner.memory import BUFFERS, activation_bytes, lasting_bytes
from hvdtrain.planner.profile import RankTimes

UNFIT = math.inf
ALIKE = 1.2  # measurements of equal ranks differ by up to this factor on a shared machine
MOST_UNITS = 16  # groups of neighbouring ranks that a division distinguishes
MOST_PARTS = 48  # groups of neighbouring components that a division distinguishes
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
    """The bytes that a rank may hold, and a function to the micro-batches that a stage holds.

    Its argument is the number of stages from this one to the end.
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
    most: int | None = None,
) -> Division | None:
    """Return the division with the smallest estimate; None if nothing fits or none is good enough.

    A division whose maximum is at least `low`, and whose sum is at least the smallest one with a
    maximum below `high`, cannot be better than these two together. Intervals that cannot contain a
    better division than the best known one are skipped.

    Args:
        times_of: returns the times of a run of ranks, given the first and their number.
        limit: None if memory is not limited.
        tolerance: by how much the estimate may exceed the smallest, as a part of it.
        better_than: divisions with a larger estimate are not of interest.
        most: ranks per run; None: all.
    """
    tables: list[Times] = []
    for first in range(ranks):
        runs = [times_of(first, n + 1) for n in range(min(ranks - first, most or ranks))]
        tables.append(Times(*(np.stack(one, axis=1) for one in zip(*runs, strict=True))))
    searched = _Divisions(components, tables, limit)
    if (smallest := searched.smallest_sum(UNFIT)) is None:
        return None
    best, total, high = smallest
    low = searched.smallest_maximum()
    intervals = [(total + low, low, high, total)]  # (bound, low, high, smallest sum below high)
    while intervals:
        bound, low, high, total = heapq.heappop(intervals)
        if bound >= min(best.seconds * (1 - tolerance), better_than):
            break
        if high - low <= EPSILON * high:
            continue
        middle = low + (high - low) / 2
        heapq.heappush(intervals, (total + middle, middle, high, total))
        if smallest := searched.smallest_sum(middle):
            division, total, maximum = smallest
            best = min(best, division, key=lambda one: one.seconds)
            if maximum > low:
                heapq.heappush(intervals, (total + low, low, maximum, total))
    return best if best.seconds <= better_than else None


class _Divisions:
    """All ways to divide components over ranks, searched by dynamic programming.

    States are (slot, rank, component). Their value is the best result of dividing the components
    from this one on over the ranks from this one on; a stage leads to a state behind it in both.
    How many stages follow matters for memory only: with a limit, states with s stages are in slot
    s; without one, all are in slot 0.

    Args:
        tables: by first rank, the times of its runs: fp64 [start, ranks - 1, stop].
    """

    def __init__(self, components: int, tables: Sequence[Times], limit: Limit | None) -> None:
        ranks = len(tables)
        self.tables, self.limit = tables, limit
        # (slot, slot of the stages behind, first rank): what can be behind a stage comes before.
        self.order = [(0, 0, first) for first in reversed(range(ranks))]
        if limit is not None:
            depths = range(1, ranks + 1)
            self.order = [(n, n - 1, first) for n in depths for first in range(ranks - n + 1)]
        slots = 1 if limit is None else ranks + 1
        self.empty = np.full((slots, ranks + 1, components + 1), UNFIT)
        self.empty[0, ranks, components] = 0.0

    def _paces(self, slot: int, first: int) -> np.ndarray:
        times = self.tables[first]
        if self.limit is None:
            return times.pace
        return np.where(self.limit.allows(times, slot), times.pace, UNFIT)

    def smallest_maximum(self) -> float:
        """Return the smallest maximum of the paces."""
        best = self.empty.copy()
        for slot, tail, first in self.order:
            pace = self._paces(slot, first)
            behind = best[tail, first + 1 : first + 1 + pace.shape[1]]
            best[slot, first] = np.maximum(pace, behind).min(axis=(1, 2))
        return float(best[:, 0, 0].min())

    def smallest_sum(self, below: float) -> tuple[Division, float, float] | None:
        """Return the division with the smallest sum if all paces are below a value.

        With it, return its sum and its maximum; None if there is no such division.
        """
        best, choice = self.empty.copy(), np.zeros(self.empty.shape, np.int64)
        lines = np.arange(best.shape[2])
        for slot, tail, first in self.order:
            pace = self._paces(slot, first)
            behind = best[tail, first + 1 : first + 1 + pace.shape[1]]
            whole = np.where(pace < below, self.tables[first].passing + behind, UNFIT)
            whole = whole.reshape(len(lines), -1)
            choice[slot, first] = whole.argmin(axis=1)  # (ranks - 1, stop) as one number
            best[slot, first] = whole[lines, choice[slot, first]]
        slot = int(np.argmin(best[:, 0, 0]))
        total, maximum = float(best[slot, 0, 0]), 0.0
        if not math.isfinite(total):
            return None
        runs: list[Run] = []
        first = start = 0
        while first < len(self.tables):
            more, stop = divmod(int(choice[slot, first, start]), len(lines))
            maximum = max(maximum, float(self.tables[first].pace[start, more, stop]))
            runs.append(Run(start, stop, first, more + 1))
            first, start = first + more + 1, stop
            slot -= self.limit is not None
        return Division(tuple(runs), total + maximum), total, maximum


class Tables:
    """Times of runs; runs of equal ranks share them.

    Attributes:
        unlike: the times of ranks, each once.
        kinds: by rank, the place of its times in `unlike`.

    Args:
        places: places between components where runs may start and end, 0 before the first one; all
            by default. Runs are then numbered by these places.
    """

    def __init__(self, question: Question, places: Sequence[int] | None = None) -> None:
        self.question, self.known = question, question.known
        costs = self.known.costs
        self.places = np.arange(len(costs) + 1) if places is None else np.asarray(places)
        # Bytes of one sample; the last component sends nothing.
        crossing = np.array([0, *(cost.output_bytes for cost in costs[:-1]), 0], float)
        self.crossing = crossing[self.places]
        # A stage cannot end with a component whose output has no gradient, such as integers.
        ends = np.array([True, *(cost.is_differentiable for cost in costs[:-1]), True])
        self.valid = (self.places[:, None] < self.places[None, :]) & ends[self.places]
        self.unlike = list({id(one): one for one in self.known.profile.ranks}.values())
        kind_of = {id(one): kind for kind, one in enumerate(self.unlike)}
        self.kinds = [kind_of[id(one)] for one in self.known.profile.ranks]
        self.cached: dict[tuple[object, ...], Any] = {}

    def times_of(self, microbatches: int, first: int, count: int) -> Times:
        """Return the times of one run of ranks, as `divide` needs them."""
        ranks, network = tuple(range(first, first + count)), self.known.network
        hosts = network.hosts
        # A rank of the stage before or behind sends to this one.
        sender = first - 1 if first else min(count, self.question.ranks - 1)
        alike = (
            *(id(self.known.profile.ranks[rank]) for rank in ranks),
            ranks if network.has_unlike_links else (),
            len({hosts[rank] for rank in ranks}),
            hosts[sender] == hosts[first],
        )
        make = partial(self._make, microbatches, ranks, sender, alike)
        times: Times = self._once(make, "times", microbatches, *alike)
        return times

    def _make(
        self, microbatches: int, ranks: tuple[int, ...], sender: int, alike: tuple[object, ...]
    ) -> Times:
        known, question, count = self.known, self.question, len(ranks)
        profile, costs, (*_, links, hosts, is_near) = known.profile.ranks, known.costs, alike
        samples = -(-question.batch_size // microbatches)
        shares = shares_of(question, ranks, samples)
        rows = [-(-samples * share // sum(shares)) for share in shares]  # the most in a cut
        # Of ranks that are alike, the one with the most samples counts.
        most_of: dict[int, int] = {}
        for kind, n in zip(self.kinds[ranks[0] : ranks[-1] + 1], rows, strict=True):
            most_of[kind] = max(n, most_of.get(kind, 0))
        working = _slowest(self._done(samples)[list(most_of), list(most_of.values())])
        if gather_seconds := known.gather_seconds(ranks):  # in the forward and the backward
            working = working + 2 * gather_seconds * self._spans([c.batch_norms for c in costs])
        working = np.where(self.valid, working, UNFIT)
        latency, most = 0.0, max(rows)
        if sender not in ranks:
            latency = known.latency_seconds(sender, ranks[0])
            message = max(profile[rank].message_seconds for rank in ranks) - latency

            def transfers() -> np.ndarray:
                # Receiving activations at the start and gradients at the end does not overlap.
                sizes, send = self.crossing * most, partial(known.send_seconds, sender, ranks[0])
                seconds = np.where(sizes > 0, message + self._between(sizes, send), 0.0)
                return np.asarray(seconds[:, None] + seconds[None, :])

            key = ("transfers", most, message, latency, links, hosts, is_near)
            working = working + self._once(transfers, *key)
        rest = self._once(partial(self._rest, ranks, (links, hosts)), "rest", *alike)
        lasting = in_flight = np.zeros((1, 1))
        if question.limits is not None:
            optimizer, recomputed = question.optimizer, known.recomputed
            lasting = self._once(
                lambda: self._spans([lasting_bytes([c], optimizer, count) for c in costs]),
                *("lasting", count),
            )
            lasting = lasting + most * BUFFERS * (self.crossing[:, None] + self.crossing[None, :])
            in_flight = self._once(
                lambda: self._spans([activation_bytes([c], most, recomputed) for c in costs]),
                *("activations", most),
            )
            factor = max(profile[rank].activation_factor for rank in ranks)
            in_flight = in_flight * factor + most * self.crossing[:, None]
        # The latencies of the input and of its gradient count once; the rank works meanwhile.
        passing = working + 2 * latency * (self.crossing > 0)[:, None]
        pace = (microbatches - 1) * working + rest if microbatches > 1 else rest
        return Times(passing, pace, lasting, in_flight)

    def _done(self, samples: int) -> np.ndarray:
        """Return the seconds of one micro-batch up to each place, by kind of rank.

        fp64 [kinds, samples + 1, places].
        """

        def of(times: RankTimes) -> np.ndarray:
            forward = times.arrays.forward.of(rows) * (1.0 + self.known.is_recomputed)
            return self._sums(forward + times.arrays.backward.of(rows))

        rows = np.arange(samples + 1)
        done: np.ndarray = self._once(
            lambda: np.array([of(times) for times in self.unlike]), "done", samples
        )
        return done

    def _rest(self, ranks: tuple[int, ...], links: object) -> np.ndarray:
        """Return y: the seconds per step besides the micro-batches."""
        known, agreement, count = self.known, self.known.agreement, len(ranks)
        kinds = dict.fromkeys(self.kinds[ranks[0] : ranks[-1] + 1])
        unlike = [self.unlike[kind] for kind in kinds]
        rest = _slowest(np.array([self._sums(times.arrays.update) for times in unlike]))
        if count > 1:
            reduced = self._once(
                lambda: self._between(
                    self._spans(known.load_bytes(count)),
                    lambda size: known.network.reduce_seconds(ranks, size),
                ),
                *("reduced", count, links),
            )
            if agreement.compress != NONE:
                coding = [
                    [sum(agreement.coding(c.coding)) for c in times.components.values()]
                    for times in unlike
                ]
                reduced = reduced + np.max([self._spans(seconds) for seconds in coding], axis=0)
            rest = reduced / (agreement.period or 1) + rest
        return np.where(self.valid, rest, UNFIT)

    def _once(self, make: Callable[[], Any], *key: object) -> Any:
        if key not in self.cached:
            self.cached[key] = make()
        return self.cached[key]

    def _between(self, sizes: np.ndarray, seconds: Callable[[float], float]) -> np.ndarray:
        """Return the seconds of each size, 0 for size 0.

        A network is linear between its breakpoints, so only these are evaluated.
        """
        largest = float(sizes.max())
        least = float(np.min(sizes, where=sizes > 0, initial=largest))
        inner = (size for size in self.known.network.breakpoints if least < size < largest)
        points = sorted({least, largest, *inner})
        values = np.interp(sizes, points, [seconds(size) for size in points])
        return np.where(sizes > 0, values, 0.0)

    def _spans(self, values: Sequence[float]) -> np.ndarray:
        """Return the sums over runs: fp64, by places [start, stop); 0 if not start < stop."""
        sums = self._sums(np.asarray(values, np.float64))
        return np.asarray(np.maximum(sums[None, :] - sums[:, None], 0.0))

    def _sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sums of all components before each place, along the last axis."""
        sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
        np.cumsum(values, axis=-1, out=sums[..., 1:])
        return np.asarray(sums[..., self.places])


def _slowest(done: np.ndarray) -> np.ndarray:
    """Return the seconds of each run of components on the slowest rank: fp64 [start, stop].

    Args:
        done: the seconds of each rank up to each place: fp64 [ranks, places].
    """
    return np.asarray((done[:, None, :] - done[:, :, None]).max(axis=0))


def shares_of(question: Question, ranks: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Return the shares of `rows` samples with which unequal ranks finish together.

    The next sample always goes to the rank that would finish it first. Ranks that are alike get
    equal shares.
    """
    slowness = np.array([question.known.profile.slowness[rank] for rank in ranks])
    # Unequal shares would change the groups of a batch norm that must stay as it is.
    if question.keeps is not None or slowness.max() / slowness.min() < ALIKE:
        return (1,) * len(ranks)
    # What each rank has surely finished when the last sample starts; an idle rank would not show
    # its speed.
    least = (rows - len(ranks)) / sum(1 / slow for slow in slowness.tolist())
    counts = np.maximum(int(rows >= len(ranks)), np.floor(least / slowness)).astype(int)
    left = rows - int(counts.sum())
    finished = (counts[:, None] + np.arange(1, left + 1)) * slowness[:, None]
    first = finished.argsort(axis=None, kind="stable")[:left] // max(1, left)
    shares: list[int] = (counts + np.bincount(first, minlength=len(ranks))).tolist()
    return tuple(shares)


def divisions(
    question: Question, schedule: str, numbers: Sequence[int], most: int
) -> Iterator[Plan]:
    """Yield the plans with the best estimates, at most one per number of micro-batches.

    Args:
        numbers: of micro-batches; those that are best most often first: they rule out others.
        most: plans.
    """
    best: list[tuple[float, int, Division]] = []
    coarse, fine = Tables(question, places_of(question)), Tables(question)
    for number in numbers:
        better_than = SPREAD * min((entry[0] for entry in best), default=UNFIT)
        limit, division = limit_of(question, schedule, number), None
        division = division_at(coarse, number, None, better_than)
        # If the best division without a limit fits, it is also the best one with the limit.
        if division and limit and not _fits(coarse, number, limit, division):
            division = division_at(coarse, number, limit, better_than)
            if division is None and len(coarse.places) < len(fine.places):
                division = division_at(fine, number, limit, better_than)
        if division is not None:
            best.append((division.seconds, number, division))
    for _, number, division in sorted(best, key=lambda entry: entry[0])[:most]:
        if len(division.runs) < 2:
            continue
        if len(coarse.places) < len(fine.places):
            division = refined(fine, number, limit_of(question, schedule, number), division)
        held = [
            (run.start, run.stop, tuple(range(run.first, run.first + run.number)))
            for run in division.runs
        ]
        yield plan_of(question, held, number, schedule)


def plan_of(
    question: Question,
    held: Iterable[tuple[int, int, tuple[int, ...]]],
    microbatches: int,
    schedule: str,
) -> Plan:
    """Return a plan whose unequal ranks have unequal shares.

    Args:
        held: for each stage, its components [start, stop) and its ranks.
    """
    names, samples = question.known.profile.names, -(-question.batch_size // microbatches)
    stages = (
        Stage(tuple(names[start:stop]), ranks, shares_of(question, ranks, samples))
        for start, stop, ranks in held
    )
    return Plan(tuple(stages), microbatches, schedule)


def division_at(
    tables: Tables, microbatches: int, limit: Limit | None, better_than: float = UNFIT
) -> Division | None:
    """Return the best division between places of the tables and groups of neighbouring ranks."""
    places, ranks = tables.places.tolist(), tables.question.ranks
    unit = unit_of(ranks)
    division = divide(
        len(places) - 1,
        ranks // unit,
        lambda first, number: tables.times_of(microbatches, unit * first, unit * number),
        limit,
        TOLERANCE,
        better_than,
    )
    if division is None:
        return None
    runs = (
        Run(places[run.start], places[run.stop], unit * run.first, unit * run.number)
        for run in division.runs
    )
    return Division(tuple(runs), division.seconds)


def unit_of(ranks: int) -> int:
    """Return how many neighbouring ranks a division keeps together: few distinguish all."""
    return next(n for n in range(1, ranks + 1) if not ranks % n and ranks // n <= MOST_UNITS)


def _fits(tables: Tables, microbatches: int, limit: Limit, division: Division) -> bool:
    for place, run in enumerate(division.runs):
        times = tables.times_of(microbatches, run.first, run.number)
        start, stop = np.searchsorted(tables.places, run[:2])
        if not limit.allows(times, len(division.runs) - place)[start, stop]:
            return False
    return True


def refined(
    tables: Tables, microbatches: int, limit: Limit | None, division: Division
) -> Division:
    """Return the best division at the places of the tables with the same groups of ranks."""
    runs = division.runs

    def times_of(stage: int, _: int) -> Times:
        times = tables.times_of(microbatches, runs[stage].first, runs[stage].number)
        if limit is None:
            return times
        fits = limit.allows(times, len(runs) - stage)
        return times._replace(pace=np.where(fits, times.pace, UNFIT))

    better = divide(
        len(tables.places) - 1, len(runs), times_of, None, TOLERANCE, division.seconds, 1
    )
    if better is None:
        return division
    pairs = zip(better.runs, runs, strict=True)
    return Division(
        tuple(old._replace(start=new.start, stop=new.stop) for new, old in pairs), better.seconds
    )


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
