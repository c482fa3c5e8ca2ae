"""What the division of a model over ranks is given: times and bytes of all runs of components."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.planner.cost import Known
from hvdtrain.planner.divide import UNFIT, Run, Times
from hvdtrain.planner.overview import OPTIMIZER_COPIES

ALIKE = 1.05  # as much as measurements of like ranks differ


@dataclass(frozen=True)
class Question:
    """What a plan is wanted for.

    Attributes:
        batch_size: images a step, over all ranks together.
        schedules: that the runtime can run for this model.
        microbatches: if the user has set them.
        limits: bytes that each rank may hold, if there are limits.
        is_synchronised: whether batch norms of replicas wait for each other.
    """

    known: Known
    batch_size: int
    optimizer: str
    schedules: Collection[str] = ("1f1b",)
    microbatches: int | None = None
    limits: Sequence[float] | None = None
    is_synchronised: bool = False

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.known.profile.ranks)


class Tables:
    """What `divide` is given for one number of micro-batches; runs of like ranks share it."""

    def __init__(self, question: Question, microbatches: int) -> None:
        self.question, self.known = question, question.known
        self.microbatches = microbatches
        self.rows = -(-question.batch_size // microbatches)
        costs = self.known.costs
        self.size = len(costs) + 1
        self.valid = np.arange(self.size)[:, None] < np.arange(self.size)[None, :]
        self.weights = _spans([cost.parameter_bytes for cost in costs])
        self.buffers = _spans([cost.buffer_bytes for cost in costs])
        recomputed = self.known.recomputed
        self.saved = _spans(
            [c.output_bytes + (0 if c.name in recomputed else c.saved_bytes) for c in costs]
        )
        # Of one sample; behind the last component nothing is handed on.
        self.crossing = np.array([0, *(cost.output_bytes for cost in costs[:-1]), 0], float)
        self.made: dict[tuple[object, ...], Times] = {}
        self.computed: dict[tuple[int, int], np.ndarray] = {}
        # Behind what emits no floating numbers no gradient comes back: no stage ends there.
        for place, cost in enumerate(costs[:-1], 1):
            if not cost.is_differentiable:
                self.valid[:, place] = False

    def times_of(self, first: int, count: int) -> Times:
        """As `divide` asks for it."""
        ranks = tuple(range(first, first + count))
        profile = self.known.profile
        key = (tuple(id(profile.ranks[rank]) for rank in ranks), *self._places(ranks))
        if key not in self.made:
            self.made[key] = self._make(ranks)
        return self.made[key]

    def estimate(self, runs: Sequence[Run]) -> float:
        """What `divide` takes a division to be."""
        tables = [(self.times_of(run.first, run.number), (run.start, run.stop)) for run in runs]
        passing = [float(times.passing[place]) for times, place in tables]
        arriving = sum(float(np.broadcast_to(t.arriving, t.passing.shape)[at]) for t, at in tables)
        besides = [float(times.besides[place]) for times, place in tables]
        paces = [
            (self.microbatches - 1) * own + more
            for own, more in zip(passing, besides, strict=True)
        ]
        return sum(passing) + arriving + max(paces)

    def fit(self, runs: Sequence[Run], limit: float) -> bool:
        """Whether no rank holds more than that."""
        for number, run in enumerate(runs):
            times, place = self.times_of(run.first, run.number), (run.start, run.stop)
            in_flight = min(self.microbatches, len(runs) - number)
            if times.bytes[place] + in_flight * times.flight_bytes[place] > limit:
                return False
        return True

    def _places(self, ranks: tuple[int, ...]) -> tuple[object, ...]:
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
        passing = np.max(
            [self._compute(rank, own) for rank, own in zip(ranks, rows, strict=True)], axis=0
        )
        handed = np.array([self._hand_over(ranks, size * max(rows)) for size in self.crossing])
        reduced = self._reduced(ranks)
        update = np.max([self._update(rank) for rank in ranks], axis=0)
        copies = 2 + OPTIMIZER_COPIES[self.question.optimizer]
        return Times(
            np.where(self.valid, passing, UNFIT),
            np.where(self.valid, reduced + update, UNFIT),
            copies * self.weights + self.buffers,
            self.saved * max(rows),
            # Its input, and the gradient of that; the rank does something else meanwhile.
            np.where(self.valid, 2 * handed[:, None], UNFIT),
        )

    def _compute(self, rank: int, rows: int) -> np.ndarray:
        key = id(self.known.profile.ranks[rank]), rows
        if key not in self.computed:
            self.computed[key] = self._compute_anew(rank, rows)
        return self.computed[key]

    def _compute_anew(self, rank: int, rows: int) -> np.ndarray:
        times = self.known.profile.ranks[rank]
        again = self.known.recomputed
        each = [
            part.forward(rows) * (2 if name in again else 1) + part.backward(rows)
            for name, part in times.components.items()
        ]
        return _spans(each)

    def _update(self, rank: int) -> np.ndarray:
        return _spans([each.update for each in self.known.profile.ranks[rank].components.values()])

    def _hand_over(self, ranks: tuple[int, ...], size: float) -> float:
        if not size:
            return 0.0
        other = self._neighbour(ranks)
        if other in ranks:
            return 0.0
        return self.known.network.hand_over_seconds(other, ranks[0], size)

    def _reduced(self, ranks: tuple[int, ...]) -> np.ndarray:
        if len(ranks) == 1:
            return np.zeros_like(self.weights)
        # Between its breakpoints a network's times are straight lines.
        network, largest = self.known.network, float(self.weights.max())
        least = float(np.min(self.weights, where=self.weights > 0, initial=largest))
        sizes = sorted({least, largest, *(s for s in network.breakpoints if least < s < largest)})
        seconds = [network.reduce_seconds(ranks, size) for size in sizes]
        found: np.ndarray = np.where(
            self.weights > 0, np.interp(self.weights, sizes, seconds), 0.0
        )
        return found


def _spans(values: Sequence[float]) -> np.ndarray:
    """Sums over [start, stop): fp64 [n + 1, n + 1]; what is not start < stop means nothing."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    found: np.ndarray = np.maximum(sums[None, :] - sums[:, None], 0.0)
    return found


def shares_of(question: Question, ranks: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Parts of `rows` samples, so that ranks which are unlike end together; equal for the alike.

    The next sample always goes to the rank that would have it done first.
    """
    slowness = [question.known.profile.slowness[rank] for rank in ranks]
    if max(slowness) / min(slowness) < ALIKE:
        return (1,) * len(ranks)
    counts = [int(rows >= len(ranks))] * len(ranks)  # a rank without any would show no pace
    for _ in range(rows - sum(counts)):
        best = min(range(len(ranks)), key=lambda k: (counts[k] + 1) * slowness[k])
        counts[best] += 1
    return tuple(counts)


def _rows(rows: int, shares: Sequence[int]) -> list[int]:
    """Samples of each replica, as a cut gives them at most."""
    return [-(-rows * share // sum(shares)) for share in shares]
