"""Divides a model over ranks: tables of the times and bytes of all runs of components."""

import copy
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import numpy as np

from hvdtrain.plan.schedule import most_in_flight
from hvdtrain.planner.agreement import NONE
from hvdtrain.planner.cost import Question
from hvdtrain.planner.divide import UNFIT, Division, Limit, Run, Times, divide, refined
from hvdtrain.planner.memory import BUFFERS, activation_bytes, lasting_bytes

ALIKE = 1.2  # measurements of equal ranks differ by up to this factor on a shared machine
MOST_UNITS = 16  # groups of neighbouring ranks that a division distinguishes
MOST_PARTS = 48  # groups of neighbouring components that a division distinguishes
NO_BYTES = np.zeros((1, 1))  # where memory is not limited
TOLERANCE = 1e-3  # part of an estimate: far below the error of the measurements


class Tables:
    """Tables for `divide` for one number of micro-batches; runs of equal ranks share them.

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
        self.valid = self.places[:, None] < self.places[None, :]
        recomputed = self.known.recomputed
        self.times_forward = np.array([1.0 + (cost.name in recomputed) for cost in costs])
        self.norms = self._spans([cost.batch_norms for cost in costs])
        # Bytes of one sample; the last component sends nothing.
        crossing = np.array([0, *(cost.output_bytes for cost in costs[:-1]), 0], float)
        self.crossing = crossing[self.places]
        # Arrays that do not depend on the number of micro-batches.
        self.lasting_arrays: dict[tuple[object, ...], np.ndarray] = {}
        self._forget()
        # A stage cannot end with a component whose output has no gradient, such as integers.
        ends = [True, *(cost.is_differentiable for cost in costs[:-1]), True]
        self.valid &= np.array(ends)[self.places][None, :]
        self.receives = self.valid & (self.crossing > 0)[:, None]
        self.unfit = np.where(self.valid, 0.0, UNFIT)

    def _forget(self) -> None:
        self.cached_times: dict[tuple[object, ...], Times] = {}
        # Arrays that several of the times need.
        self.cached_arrays: dict[tuple[object, ...], np.ndarray] = {}

    def with_microbatches(self, microbatches: int) -> "Tables":
        """Return the tables for as many or more micro-batches, which share what they can."""
        other = copy.copy(self)
        other.microbatches = microbatches
        other.rows = -(-self.question.batch_size // microbatches)
        other._forget()
        return other

    def times_of(self, first: int, count: int) -> Times:
        """Return the tables of one run of ranks, as `divide` needs them."""
        ranks = tuple(range(first, first + count))
        profile = self.known.profile
        key = (tuple(id(profile.ranks[rank]) for rank in ranks), *self._hosts(ranks))
        if key not in self.cached_times:
            self.cached_times[key] = self._make(ranks, key)
        return self.cached_times[key]

    def estimate(self, runs: Sequence[Run]) -> float:
        """Return the estimate of `divide` for a division."""
        tables = [(self.times_of(run.first, run.number), (run.start, run.stop)) for run in runs]
        total = sum(float((times.passing + times.arriving)[place]) for times, place in tables)
        return total + max(float(t.paces(self.microbatches)[place]) for t, place in tables)

    def fit(self, runs: Sequence[Run], limit: Limit) -> bool:
        """Return whether no rank holds more than the limit; runs end at places of the tables."""
        index = {place: number for number, place in enumerate(self.places.tolist())}
        return all(
            limit.allows(self.times_of(run.first, run.number), len(runs) - number)[
                index[run.start], index[run.stop]
            ]
            for number, run in enumerate(runs)
        )

    def numbered(self, runs: Iterable[Run]) -> tuple[Run, ...]:
        """Return runs whose components are numbered as in the model, not by places."""
        places = self.places.tolist()
        return tuple(run._replace(start=places[run.start], stop=places[run.stop]) for run in runs)

    def _hosts(self, ranks: tuple[int, ...]) -> tuple[object, ...]:
        """Return the number of hosts, and whether the rank before is on the same host."""
        hosts = self.known.network.hosts
        other = self._neighbour(ranks)
        return len({hosts[rank] for rank in ranks}), hosts[other] == hosts[ranks[0]]

    def _neighbour(self, ranks: tuple[int, ...]) -> int:
        """Return a rank of the stage before or after."""
        return ranks[0] - 1 if ranks[0] else min(ranks[-1] + 1, self.question.ranks - 1)

    def _make(self, ranks: tuple[int, ...], key: tuple[object, ...]) -> Times:
        shares = shares_of(self.question, ranks, self.rows)
        rows = _rows(self.rows, shares)
        # Of ranks that are alike, the one with the most samples counts.
        unlike = {
            id(self.known.profile.ranks[rank]): (rank, count)
            for count, rank in sorted(zip(rows, ranks, strict=True))
        }.values()
        passing = _slowest([self._done(rank)[count] for rank, count in unlike])
        if gather_seconds := self.known.gather_seconds(ranks):
            passing = passing + 2 * gather_seconds * self.norms  # in the forward and the backward
        latency, transfers = self._receiving(ranks, max(rows))
        lasting, in_flight = NO_BYTES, NO_BYTES
        if self.question.limits is not None:
            lasting = self._kept("lasting", len(ranks), make=lambda: self._lasting(len(ranks)))
            lasting = lasting + max(rows) * BUFFERS * (
                self.crossing[:, None] + self.crossing[None, :]
            )
            in_flight = self._in_flight(ranks, max(rows))
        return Times(
            passing + transfers,
            self._kept("rest", *key, make=lambda: self._rest(ranks)),
            lasting,
            in_flight,
            # The latencies of the input and of its gradient; the rank works meanwhile.
            self._kept("arriving", latency, make=lambda: 2 * latency * self.receives),
        )

    def _rest(self, ranks: tuple[int, ...]) -> np.ndarray:
        """Return the seconds per step of the runs on some ranks besides their micro-batches."""
        alike = {id(self.known.profile.ranks[rank]): rank for rank in ranks}.values()
        updates = _slowest([self._updated(rank) for rank in alike])
        rest: np.ndarray = self._reduced(ranks) + updates + self.unfit
        return rest

    def _lasting(self, replicas: int) -> np.ndarray:
        costs, optimizer = self.known.costs, self.question.optimizer
        return self._spans([lasting_bytes([cost], optimizer, replicas) for cost in costs])

    def _in_flight(self, ranks: tuple[int, ...], rows: int) -> np.ndarray:
        """Return the bytes of one micro-batch in flight on the fullest rank."""
        profile = self.known.profile.ranks
        counted = self._once("activations", rows, make=lambda: self._activations(rows))
        factor = max(profile[rank].activation_factor for rank in ranks)
        held: np.ndarray = counted * factor + rows * self.crossing[:, None]
        return held

    def _activations(self, rows: int) -> np.ndarray:
        costs, recomputed = self.known.costs, self.known.recomputed
        return self._spans([activation_bytes([cost], rows, recomputed) for cost in costs])

    def _once(self, *key: object, make: Callable[[], np.ndarray]) -> np.ndarray:
        if key not in self.cached_arrays:
            self.cached_arrays[key] = make()
        return self.cached_arrays[key]

    def _kept(self, *key: object, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return `_once` of what does not depend on the number of micro-batches."""
        if key not in self.lasting_arrays:
            self.lasting_arrays[key] = make()
        return self.lasting_arrays[key]

    def _done(self, rank: int) -> np.ndarray:
        """Return the seconds of one micro-batch up to each place: fp64 [most rows + 1, places].

        Row n is of n samples; that of 0 samples is not used.
        """
        times = self.known.profile.ranks[rank]

        def make() -> np.ndarray:
            rows, arrays = np.arange(self.most_rows + 1), times.arrays
            seconds = arrays.forward.of(rows) * self.times_forward + arrays.backward.of(rows)
            return self._sums(seconds)

        return self._kept("done", id(times), make=make)

    def _updated(self, rank: int) -> np.ndarray:
        """Return the seconds of the updates up to each place: fp64 [places]."""
        times = self.known.profile.ranks[rank]
        return self._kept("updated", id(times), make=lambda: self._sums(times.arrays.update))

    def _receiving(self, ranks: tuple[int, ...], rows: int) -> tuple[float, np.ndarray]:
        """Return the latency to the ranks, and the seconds of sending and receiving by run.

        Receiving activations at the start and gradients at the end does not overlap.
        """
        other = self._neighbour(ranks)
        if other in ranks:
            return 0.0, self.unfit
        latency = self.known.latency_seconds(other, ranks[0])
        message = max(self.known.profile.ranks[rank].message_seconds for rank in ranks) - latency

        def make() -> np.ndarray:
            sizes = self.crossing * rows
            moving = self._between(
                sizes, lambda size: self.known.send_seconds(other, ranks[0], size)
            )
            seconds = np.where(sizes > 0, message + moving, 0.0)
            return seconds[:, None] + seconds[None, :] + self.unfit

        hosts = self._hosts(ranks)
        return latency, self._once("receiving", rows, message, latency, *hosts, make=make)

    def _reduced(self, ranks: tuple[int, ...]) -> np.ndarray:
        if len(ranks) == 1:
            return np.zeros_like(self.norms)
        count = len(ranks)

        def make() -> np.ndarray:
            loads = self._spans(self.known.load_bytes(count))
            return self._between(
                loads, lambda size: self.known.network.reduce_seconds(ranks, size)
            )

        reduced = self._kept("reduced", count, *self._hosts(ranks), make=make)
        if self.known.agreement.compress != NONE:
            reduced = reduced + _largest(map(self._coding, ranks))
        return reduced / (self.known.agreement.period or 1)

    def _coding(self, rank: int) -> np.ndarray:
        times, agreement = self.known.profile.ranks[rank], self.known.agreement
        parts = times.components.values()

        def make() -> np.ndarray:
            return self._spans([sum(agreement.coding(part.coding)) for part in parts])

        return self._kept("coding", id(times), make=make)

    def _between(self, sizes: np.ndarray, seconds: Callable[[float], float]) -> np.ndarray:
        """Return the seconds of each size, 0 for size 0.

        A network is linear between its breakpoints, so only these are evaluated.
        """
        largest = float(sizes.max())
        least = float(np.min(sizes, where=sizes > 0, initial=largest))
        inner = (size for size in self.known.network.breakpoints if least < size < largest)
        points = sorted({least, largest, *inner})
        result: np.ndarray = np.where(
            sizes > 0, np.interp(sizes, points, [seconds(size) for size in points]), 0.0
        )
        return result

    def _spans(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
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


def _slowest(sums: Sequence[np.ndarray]) -> np.ndarray:
    """Return the seconds of each run of components on the slowest rank: fp64 [start, stop].

    Where not start < stop, there is no run, and the value means nothing.

    Args:
        sums: by rank, the seconds up to each place: fp64 [places].
    """
    done = np.array(sums)
    seconds: np.ndarray = (done[:, None, :] - done[:, :, None]).max(axis=0)
    return seconds


def _largest(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return reduce(np.maximum, arrays)


def _rows(rows: int, shares: Sequence[int]) -> list[int]:
    """Return the samples of each replica: the most that a cut gives it."""
    return [-(-rows * share // sum(shares)) for share in shares]


def divided(tables: Tables, schedule: str, better_than: float) -> Division | None:
    """Return the best division for one schedule and number of micro-batches.

    Its unit is a group of neighbouring ranks, see `unit_of`, and of components, if the tables have
    the places of `places_of`.
    """
    question, microbatches = tables.question, tables.microbatches
    limit = limit_of(question, schedule, microbatches)
    division = division_at(tables, None, better_than)
    # If the best division without a limit fits, it is also the best one with the limit.
    if division is not None and limit is not None and not tables.fit(division.runs, limit):
        division = division_at(tables, limit, better_than)
        if division is None and len(tables.places) <= len(question.known.costs):
            division = division_at(Tables(question, microbatches), limit, better_than)
    return division


def division_at(tables: Tables, limit: Limit | None, better_than: float) -> Division | None:
    """Return the best division with boundaries at the places of the tables."""
    question, places = tables.question, tables.places.tolist()
    unit = unit_of(question.ranks)
    division = divide(
        components=len(places) - 1,
        ranks=question.ranks // unit,
        microbatches=tables.microbatches,
        times_of=lambda first, number: tables.times_of(unit * first, unit * number),
        limit=limit,
        tolerance=TOLERANCE,
        better_than=better_than,
    )
    if division is None:
        return None
    runs = tuple(
        Run(run.start, run.stop, unit * run.first, unit * run.number) for run in division.runs
    )
    return Division(tables.numbered(runs), division.seconds)


def refined_division(
    question: Question, schedule: str, microbatches: int, division: Division
) -> Division:
    """Return a division whose boundaries were moved to any place, as long as that helps."""
    if len(places_of(question)) > len(question.known.costs):
        return division  # they were at the best of all places already
    tables, limit = Tables(question, microbatches), limit_of(question, schedule, microbatches)
    runs = refined(division.runs, microbatches, tables.times_of, limit)
    return Division(runs, tables.estimate(runs))


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


def unit_of(ranks: int) -> int:
    """Return how many neighbouring ranks a division keeps together: 1 if there are few ranks."""
    return next(
        size for size in range(1, ranks + 1) if not ranks % size and ranks // size <= MOST_UNITS
    )
