"""Chooses a plan: divisions for each number of micro-batches, played through; the shortest wins.

The division (`divide`) is exact for its estimate. The estimate leaves out what only a schedule
shows (waits of stages that are unlike, a bubble that weight gradients fill), so that the best
division for each number of micro-batches, and the plans that users know by name, are played
through with all costs, and the shortest of those that fit is chosen.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.parallel.cut import cut
from hvdtrain.parallel.plan import Plan, Stage, pipeline, replicated
from hvdtrain.planner.cost import Known, plan_costs
from hvdtrain.planner.divide import UNFIT, Division, Times, divide
from hvdtrain.planner.overview import OPTIMIZER_COPIES, Overview, overview

if TYPE_CHECKING:
    from hvdtrain.models.costs import ComponentCost

MOST_MICROBATCHES = 64
BETTER = 0.985  # a plan has to be so much shorter than a simpler one to be preferred
GIB = 2**30
WORK = "compute"  # the kind of a timeline's events


@dataclass(frozen=True)
class Question:
    """What a plan is wanted for.

    Attributes:
        batch_size: images a step, over all ranks together.
        schedules: that the runtime can run for this model.
        microbatches: if the user has set them.
        limits: bytes that each rank may hold, if there are limits.
    """

    known: Known
    batch_size: int
    optimizer: str
    schedules: Collection[str] = ("1f1b",)
    microbatches: int | None = None
    limits: Sequence[float] | None = None

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.known.profile.ranks)


@dataclass(frozen=True)
class Candidate:
    """A plan with its name and what a step of it is predicted to take."""

    name: str
    overview: Overview
    resident: tuple[int, ...]  # bytes of each rank's process before the model

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.overview.plan

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.overview.timeline.seconds

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """What each rank holds at its peak, its process included."""
        memory = self.overview.memory
        return tuple(memory[rank].total + self.resident[rank] for rank in sorted(memory))

    @property
    def own_seconds(self) -> tuple[float, ...]:
        """What each rank computes in a step."""
        events = self.overview.timeline.events
        return tuple(
            sum(each.end - each.start for each in events if (each.rank, each.kind) == (rank, WORK))
            for rank in self.plan.ranks
        )

    def shortage(self, limits: Sequence[float] | None) -> float:
        """Bytes that the rank which lacks most lacks; 0 if the plan fits."""
        if limits is None:
            return 0.0
        pairs = zip(self.rank_bytes, limits, strict=True)
        return max(0.0, *(held - limit for held, limit in pairs))


@dataclass(frozen=True)
class Solution:
    """The plan that was chosen, and what it was chosen from.

    Attributes:
        candidates: all that fit, the shortest first.
        bound: seconds that no plan of these ranks can be shorter than.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    bound: float

    @property
    def gap(self) -> float:
        """How much longer than the bound the chosen plan is, as a part of the bound."""
        return self.chosen.seconds / self.bound - 1 if self.bound else 0.0


def solve(question: Question) -> Solution:
    """The plan of the shortest predicted step among those that fit.

    Raises:
        UsageError: if nothing fits, naming the component and the shortage.
    """
    played = {each.plan: each for each in reversed(list(_candidates(question)))}
    fitting = [each for each in played.values() if not each.shortage(question.limits)]
    if not fitting:
        raise UsageError(_nothing_fits(question, list(played.values())))
    ordered = sorted(fitting, key=lambda each: each.seconds)
    close = [each for each in fitting if BETTER * each.seconds <= ordered[0].seconds]
    chosen = min(close, key=lambda each: (_parts(each.plan), each.seconds))
    return Solution(chosen, tuple(ordered), lower_bound(question))


def _parts(plan: Plan) -> int:
    """How much there is to a plan: of two that are as fast the simpler is better."""
    return len(plan.stages) * plan.microbatches


def calibrated(question: Question, plan: Plan, own_seconds: Sequence[float]) -> Question:
    """The question with each rank as slow as steps of `plan` showed it to be.

    So a profile follows what time-sharing with other processes costs, which short measurements
    of components do not show.

    Args:
        own_seconds: what each rank took in a step, without waiting for others.
    """
    predicted = play(question, plan, "").own_seconds
    factors = [own / max(each, 1e-9) for own, each in zip(own_seconds, predicted, strict=True)]
    known = question.known
    return replace(question, known=replace(known, profile=known.profile.scaled(factors)))


def play(question: Question, plan: Plan, name: str) -> Candidate:
    """Play a step of a plan through."""
    known = question.known
    costs = plan_costs(plan, cut(plan, question.batch_size), known)
    found = overview(
        *(plan, known.costs, question.batch_size, question.optimizer),
        known.recomputed,
        costs,
    )
    return Candidate(name, found, tuple(rank.resident_bytes for rank in known.profile.ranks))


def _candidates(question: Question) -> Iterator[Candidate]:
    """Plans that are worth playing through, by the names that users know them by."""
    names, ranks = question.known.profile.names, question.ranks
    for number in _accumulations(question):
        plan = replicated(names, ranks, number, None)
        yield play(question, plan, "single" if ranks == 1 else "dp")
    if ranks == 1:
        return
    shares = _shares(question, tuple(range(ranks)), question.batch_size)
    if len(set(shares)) > 1:
        stage = Stage(tuple(names), tuple(range(ranks)), shares)
        yield play(question, Plan((stage,), question.microbatches or 1), "dp, unequal shares")
    yield from _named_pipelines(question)
    for number in _numbers_of_microbatches(question):
        found = _divided(question, number)
        if found is None or len(found.runs) == 1:
            continue
        for schedule in question.schedules:
            if schedule in ("1f1b", "zb-h1", "gpipe"):
                yield play(question, _as_plan(question, found, number, schedule), "divided")


def _accumulations(question: Question) -> list[int]:
    """Micro-batches of data parallelism: several only save memory."""
    if question.microbatches:
        return [question.microbatches]
    return [1] if question.limits is None else [1, 2, 4, 8]


def _numbers_of_microbatches(question: Question) -> list[int]:
    if question.microbatches:
        return [question.microbatches]
    powers = [2**power for power in range(1, 7)]
    return [number for number in powers if number <= min(MOST_MICROBATCHES, question.batch_size)]


def _named_pipelines(question: Question) -> Iterator[Candidate]:
    """`mp` and `hp:SxR`, cut where the work is even."""
    names, ranks = question.known.profile.names, question.ranks
    work = [cost.forward_flops for cost in question.known.costs]
    shapes = [(stages, ranks // stages) for stages in range(2, ranks + 1) if ranks % stages == 0]
    for stages, replicas in shapes:
        if stages > len(names):
            continue
        name = "mp" if replicas == 1 else f"hp:{stages}x{replicas}"
        for schedule in question.schedules:
            made = 2 * stages if schedule == "interleaved" else stages
            if made > len(names):
                continue
            plan = pipeline(
                names, work, ranks, made, replicas, question.microbatches, schedule, name
            )
            yield play(question, plan, f"{name}, {schedule}")


def _divided(question: Question, microbatches: int) -> Division | None:
    limits = question.limits
    spare = None
    if limits is not None:
        resident = [rank.resident_bytes for rank in question.known.profile.ranks]
        spare = min(limit - held for limit, held in zip(limits, resident, strict=True))
    tables = _Tables(question, microbatches)
    return divide(len(question.known.costs), question.ranks, microbatches, tables.times_of, spare)


class _Tables:
    """What `divide` is given for one number of micro-batches; runs of like ranks share it."""

    def __init__(self, question: Question, microbatches: int) -> None:
        self.question, self.known = question, question.known
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

    def times_of(self, first: int, count: int) -> Times:
        """As `divide` asks for it."""
        ranks = tuple(range(first, first + count))
        profile = self.known.profile
        key = (tuple(id(profile.ranks[rank]) for rank in ranks), self._hosts(ranks))
        if key not in self.made:
            self.made[key] = self._make(ranks)
        return self.made[key]

    def _hosts(self, ranks: tuple[int, ...]) -> object:
        hosts = getattr(self.known.network, "hosts", None)
        return len({hosts[rank] for rank in ranks}) if hosts else None

    def _make(self, ranks: tuple[int, ...]) -> Times:
        shares = _shares(self.question, ranks, self.rows)
        rows = _rows(self.rows, shares)
        passing = np.max(
            [self._compute(rank, own) for rank, own in zip(ranks, rows, strict=True)], axis=0
        )
        handed = np.array([self._hand_over(ranks, size * max(rows)) for size in self.crossing])
        passing = passing + 2 * (handed[:, None] + handed[None, :])
        reduced = self._reduced(ranks)
        update = np.max([self._update(rank) for rank in ranks], axis=0)
        copies = 2 + OPTIMIZER_COPIES[self.question.optimizer]
        return Times(
            np.where(self.valid, passing, UNFIT),
            np.where(self.valid, reduced + update, UNFIT),
            copies * self.weights + self.buffers,
            self.saved * max(rows),
        )

    def _compute(self, rank: int, rows: int) -> np.ndarray:
        times = self.known.profile.ranks[rank]
        again = self.known.recomputed
        each = [
            part.forward(rows) * (2 if name in again else 1) + part.backward(rows)
            for name, part in times.components.items()
        ]
        found: np.ndarray = _spans(each) + 2 * times.action
        return found

    def _update(self, rank: int) -> np.ndarray:
        return _spans([each.update for each in self.known.profile.ranks[rank].components.values()])

    def _hand_over(self, ranks: tuple[int, ...], size: float) -> float:
        if not size:
            return 0.0
        other = ranks[0] - 1 if ranks[0] else ranks[-1] + 1
        if other >= self.question.ranks:
            return 0.0
        return self.known.network.hand_over_seconds(other, ranks[0], size)

    def _reduced(self, ranks: tuple[int, ...]) -> np.ndarray:
        if len(ranks) == 1:
            return np.zeros_like(self.weights)
        sizes = np.unique(self.weights)
        seconds = [self.known.network.reduce_seconds(ranks, size) for size in sizes]
        found: np.ndarray = np.interp(self.weights, sizes, seconds)
        return found


def _spans(values: Sequence[float]) -> np.ndarray:
    """Sums over [start, stop): fp64 [n + 1, n + 1]; what is not start < stop means nothing."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    found: np.ndarray = np.maximum(sums[None, :] - sums[:, None], 0.0)
    return found


def _shares(question: Question, ranks: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Parts of `rows` samples, so that ranks which are unlike end together; equal for the alike.

    The next sample always goes to the rank that would have it done first.
    """
    slowness = [question.known.profile.slowness[rank] for rank in ranks]
    if max(slowness) / min(slowness) < 1.05:  # as much as measurements of like ranks differ
        return (1,) * len(ranks)
    counts = [0] * len(ranks)
    for _ in range(rows):
        best = min(range(len(ranks)), key=lambda k: (counts[k] + 1) * slowness[k])
        counts[best] += 1
    return tuple(counts)


def _rows(rows: int, shares: Sequence[int]) -> list[int]:
    """Samples of each replica, as a cut gives them at most."""
    return [-(-rows * share // sum(shares)) for share in shares]


def _as_plan(question: Question, found: Division, microbatches: int, schedule: str) -> Plan:
    names = question.known.profile.names
    rows = -(-question.batch_size // microbatches)
    stages = []
    for run in found.runs:
        ranks = tuple(range(run.first, run.first + run.number))
        shares = _shares(question, ranks, rows)
        stages.append(Stage(tuple(names[run.start : run.stop]), ranks, shares))
    return Plan(tuple(stages), microbatches, schedule)


def lower_bound(question: Question) -> float:
    """Seconds that no plan can be shorter than: all samples, all components, nobody waiting.

    Each component takes at least its fewest seconds a sample, at whatever number of samples, and
    the ranks together are as fast as the sum of their speeds.
    """
    fastest = min(
        question.known.profile.ranks, key=lambda rank: _least_seconds(rank.components.values())
    )
    again = question.known.recomputed
    each = sum(
        part.forward.least_each * (2 if name in again else 1) + part.backward.least_each
        for name, part in fastest.components.items()
    )
    speed = sum(1 / slow for slow in question.known.profile.slowness)
    return question.batch_size * each / speed


def _least_seconds(parts: "Collection[object]") -> float:
    return sum(part.forward.least_each + part.backward.least_each for part in parts)  # type: ignore[attr-defined]


def _nothing_fits(question: Question, played: "list[Candidate]") -> str:
    """Which component is too large for every rank, or what the plan that lacks least lacks."""
    limits = question.limits or ()
    room = max(
        limit - rank.resident_bytes
        for limit, rank in zip(limits, question.known.profile.ranks, strict=True)
    )
    copies = 2 + OPTIMIZER_COPIES[question.optimizer]

    def held(cost: "ComponentCost") -> int:
        return copies * cost.parameter_bytes + cost.buffer_bytes + cost.saved_bytes

    largest = max(question.known.costs, key=held)
    if held(largest) > room:
        return (
            f"no plan fits: {largest.name} alone needs {held(largest) / GIB:.2f} GiB, "
            f"{(held(largest) - room) / GIB:.2f} more than a rank has left of its limit: "
            "raise --memory-limit"
        )
    closest = min(played, key=lambda each: each.shortage(limits))
    lacking = closest.shortage(limits)
    fullest = int(np.argmax([a - b for a, b in zip(closest.rank_bytes, limits, strict=True)]))
    held_there = [
        name
        for stage in closest.plan.stages_of(fullest)
        for name in closest.plan.stages[stage].components
    ]
    heaviest = max(held_there, key=lambda name: held(question.known.by_name[name]))
    return (
        f"no plan fits: under the closest, {closest.name}, rank {fullest} lacks "
        f"{lacking / GIB:.2f} GiB, most of it for {heaviest}: raise --memory-limit, use "
        "--recompute all, a smaller --batch-size or more ranks"
    )
