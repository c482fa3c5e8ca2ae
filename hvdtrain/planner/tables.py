"""What the division of a model over ranks is given: times and bytes of all runs of components."""

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from hvdtrain.parallel.normgroups import is_same
from hvdtrain.parallel.plan import Plan
from hvdtrain.planner.cost import Known
from hvdtrain.planner.divide import UNFIT, Run, Times
from hvdtrain.planner.overview import OPTIMIZER_COPIES, copies_held

ALIKE = 1.2  # as much as measurements of like ranks differ, on a shared machine


@dataclass(frozen=True)
class Question:
    """What a plan is wanted for.

    Attributes:
        batch_size: images a step, over all ranks together.
        schedules: that the runtime can run for this model.
        microbatches: if the user has set them.
        limits: bytes that each rank may hold, if there are limits.
        keeps: a plan, if batch norm must compute what it does under that one; and for batches of
            these sizes.
    """

    known: Known
    batch_size: int
    optimizer: str
    schedules: Collection[str] = ("1f1b",)
    microbatches: int | None = None
    limits: Sequence[float] | None = None
    keeps: tuple[Plan, tuple[int, ...]] | None = None

    def allows(self, plan: Plan) -> bool:
        """Whether batch norm computes what it has to."""
        if self.keeps is None:
            return True
        before, sizes = self.keeps
        normed = [cost.name for cost in self.known.costs if cost.batch_norms]
        return is_same(before, plan, sizes, normed, self.known.is_synchronised)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.known.profile.ranks)


class Tables:
    """What `divide` is given for one number of micro-batches; runs of like ranks share it.

    Args:
        places: between components, where runs may begin and end: 0 before the first one; all by
            default. Runs are then numbered by them.
    """

    def __init__(
        self, question: Question, microbatches: int, places: Sequence[int] | None = None
    ) -> None:
        self.question, self.known = question, question.known
        self.microbatches = microbatches
        self.rows = -(-question.batch_size // microbatches)
        costs = self.known.costs
        self.places = np.arange(len(costs) + 1) if places is None else np.asarray(places)
        self.valid = self.places[:, None] < self.places[None, :]
        self.weights = self._spans([cost.parameter_bytes for cost in costs])
        self.buffers = self._spans([cost.buffer_bytes for cost in costs])
        recomputed = self.known.recomputed
        self.times_forward = np.array([1.0 + (cost.name in recomputed) for cost in costs])
        self.saved = self._spans(
            [c.output_bytes + (0 if c.name in recomputed else c.saved_bytes) for c in costs]
        )
        self.norms = self._spans([cost.batch_norms for cost in costs])
        fixed = [0 if cost.name in recomputed else cost.fixed_bytes for cost in costs]
        self.fixed = self._spans(fixed)
        # Of one sample; behind the last component nothing is handed on.
        crossing = np.array([0, *(cost.output_bytes for cost in costs[:-1]), 0], float)
        self.crossing = crossing[self.places]
        self.made: dict[tuple[object, ...], Times] = {}
        self.kept: dict[tuple[object, ...], np.ndarray] = {}  # what several of them need
        # Behind what emits no floating numbers no gradient comes back: no stage ends there.
        ends = [True, *(cost.is_differentiable for cost in costs[:-1]), True]
        self.valid &= np.array(ends)[self.places][None, :]

    def times_of(self, first: int, count: int) -> Times:
        """As `divide` asks for it."""
        ranks = tuple(range(first, first + count))
        profile = self.known.profile
        key = (tuple(id(profile.ranks[rank]) for rank in ranks), *self._hosts(ranks))
        if key not in self.made:
            self.made[key] = self._make(ranks)
        return self.made[key]

    def estimate(self, runs: Sequence[Run]) -> float:
        """What `divide` takes a division to be."""
        tables = [(self.times_of(run.first, run.number), (run.start, run.stop)) for run in runs]
        whole = sum(float((times.passing + times.arriving)[place]) for times, place in tables)
        return whole + max(float(t.paces(self.microbatches)[place]) for t, place in tables)

    def fit(self, runs: Sequence[Run], limit: float) -> bool:
        """Whether no rank holds more than that."""
        return all(
            self.times_of(run.first, run.number).fits(
                limit, min(self.microbatches, len(runs) - number)
            )[run.start, run.stop]
            for number, run in enumerate(runs)
        )

    def _hosts(self, ranks: tuple[int, ...]) -> tuple[object, ...]:
        """On how many hosts they are, and whether what is before them is on another."""
        hosts = self.known.network.hosts
        other = self._neighbour(ranks)
        return len({hosts[rank] for rank in ranks}), hosts[other] == hosts[ranks[0]]

    def _neighbour(self, ranks: tuple[int, ...]) -> int:
        """A rank of the stage before or behind."""
        return ranks[0] - 1 if ranks[0] else min(ranks[-1] + 1, self.question.ranks - 1)

    def _make(self, ranks: tuple[int, ...]) -> Times:
        shares = shares_of(self.question, ranks, self.rows)
        rows = _rows(self.rows, shares)
        # Forward and backward.
        gathered = 2 * self.known.gather_seconds(ranks) * self.norms
        passing = _largest(map(self._compute, ranks, rows)) + gathered
        taking, latency = self._taking(ranks, max(rows))
        reduced = self._reduced(ranks)
        update = _largest(map(self._update, ranks))
        optimizer = self.question.optimizer
        copies = 2 + OPTIMIZER_COPIES[optimizer] + copies_held(optimizer, len(ranks))
        profile = self.known.profile.ranks
        return Times(
            # Activations at its start and gradients at its end are taken in beside nothing else.
            np.where(self.valid, passing + taking[:, None] + taking[None, :], UNFIT),
            np.where(self.valid, reduced + update, UNFIT),
            copies * self.weights + self.buffers,
            self.saved * max(rows) * max(profile[rank].activation_factor for rank in ranks)
            + self.fixed,
            # Its input, and the gradient of that; the rank does something else meanwhile.
            np.where(self.valid & (self.crossing > 0)[:, None], 2 * latency, 0.0),
        )

    def _once(self, *key: object, make: Callable[[], np.ndarray]) -> np.ndarray:
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def _compute(self, rank: int, rows: int) -> np.ndarray:
        own = self.known.profile.ranks[rank]

        def make() -> np.ndarray:
            forward, backward = own.each.forward(rows), own.each.backward(rows)
            return self._spans(forward * self.times_forward + backward)

        return self._once("compute", id(own), rows, make=make)

    def _update(self, rank: int) -> np.ndarray:
        own = self.known.profile.ranks[rank]
        return self._once("update", id(own), make=lambda: self._spans(own.each.update))

    def _taking(self, ranks: tuple[int, ...], rows: int) -> tuple[np.ndarray, float]:
        """Seconds of sending and taking in what crosses each place; and until it is there."""
        other, sizes = self._neighbour(ranks), self.crossing * rows
        if other in ranks or not sizes.any():
            return np.zeros_like(sizes), 0.0
        latency = self.known.latency_seconds(other, ranks[0])
        own = max(self.known.profile.ranks[rank].message_seconds for rank in ranks) - latency

        def make() -> np.ndarray:
            return self._between(
                sizes, lambda size: self.known.hand_over_seconds(other, ranks[0], size)
            )

        handed = self._once("taking", rows, *self._hosts(ranks), make=make)
        return np.where(sizes > 0, own + handed, 0.0), latency

    def _reduced(self, ranks: tuple[int, ...]) -> np.ndarray:
        if len(ranks) == 1:
            return np.zeros_like(self.weights)

        def make() -> np.ndarray:
            network = self.known.network
            return self._between(self.weights, lambda size: network.reduce_seconds(ranks, size))

        return self._once("reduced", len(ranks), *self._hosts(ranks), make=make)

    def _between(self, sizes: np.ndarray, seconds: Callable[[float], float]) -> np.ndarray:
        """Seconds of each size, 0 of none: between a network's breakpoints are straight lines."""
        largest = float(sizes.max())
        least = float(np.min(sizes, where=sizes > 0, initial=largest))
        inner = (size for size in self.known.network.breakpoints if least < size < largest)
        points = sorted({least, largest, *inner})
        found: np.ndarray = np.where(
            sizes > 0, np.interp(sizes, points, [seconds(size) for size in points]), 0.0
        )
        return found

    def _spans(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """Sums over runs: fp64, by places [start, stop); nothing where not start < stop."""
        sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])[self.places]
        found: np.ndarray = np.maximum(sums[None, :] - sums[:, None], 0.0)
        return found


def shares_of(question: Question, ranks: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Parts of `rows` samples, so that ranks which are unlike end together; equal for the alike.

    The next sample always goes to the rank that would have it done first.
    """
    if question.keeps is not None:
        return (1,) * len(ranks)  # others are none of those that are kept
    slowness = [question.known.profile.slowness[rank] for rank in ranks]
    if max(slowness) / min(slowness) < ALIKE:
        return (1,) * len(ranks)
    counts = [int(rows >= len(ranks))] * len(ranks)  # a rank without any would show no pace
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


def _largest(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return reduce(np.maximum, arrays)


def _rows(rows: int, shares: Sequence[int]) -> list[int]:
    """Samples of each replica, as a cut gives them at most."""
    return [-(-rows * share // sum(shares)) for share in shares]
