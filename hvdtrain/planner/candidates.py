"""Candidate plans, and the simulated step of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan, Stage, pipeline, replicated
from hvdtrain.plan.schedule import most_in_flight, training_step
from hvdtrain.planner.components import RankTimes
from hvdtrain.planner.cost import lasting_bytes, plan_costs, process_bytes
from hvdtrain.planner.divide import UNFIT, Division, Limit, Run, Times, divide, refined
from hvdtrain.planner.network import MeasuredNetwork
from hvdtrain.planner.overview import Overview, played
from hvdtrain.planner.tables import Question, Tables, shares_of

WORK, TRANSFER = "compute", "communication"  # kinds of a timeline's events
LITTLE = 0.1  # part of a step below which a rank's time says nothing about its speed
MOST_SLOWER = 10.0  # a network may be this many times slower, or faster, than measured


@dataclass(frozen=True)
class Candidate:
    """A plan with its name and a simulated step."""

    name: str
    overview: Overview
    ranks: tuple[RankTimes, ...]

    @property
    def plan(self) -> Plan:
        """Return the plan."""
        return self.overview.plan

    @property
    def seconds(self) -> float:
        """Return the predicted seconds per step."""
        return self.overview.timeline.seconds

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Return the peak memory of each rank in bytes, with its process and temporary copies."""
        return tuple(
            process_bytes(
                lasting=self._lasting_bytes(rank),
                activations=held.activations,
                resident=self.ranks[rank].resident_bytes,
                factor=self.ranks[rank].activation_factor,
            )
            for rank, held in sorted(self.overview.memory.items())
        )

    def _lasting_bytes(self, rank: int) -> int:
        costs, optimizer = self.overview.costs, self.overview.optimizer
        stages = [self.plan.stages[number] for number in self.plan.stages_of(rank)]
        return sum(
            lasting_bytes([costs[name] for name in stage.components], optimizer, len(stage.ranks))
            for stage in stages
        )

    @property
    def own_seconds(self) -> tuple[float, ...]:
        """Return the seconds per step that each rank computes."""
        return self._spent_on(WORK)

    @property
    def transfer_seconds(self) -> tuple[float, ...]:
        """Return the seconds per step that each rank spends on sending and receiving."""
        return self._spent_on(TRANSFER)

    def _spent_on(self, kind: str) -> tuple[float, ...]:
        events = self.overview.timeline.events
        return tuple(
            sum(
                event.end - event.start
                for event in events
                if (event.rank, event.kind) == (rank, kind)
            )
            for rank in self.plan.ranks
        )

    def shortage(self, limits: Sequence[float] | None) -> float:
        """Return the bytes by which the worst rank exceeds its limit; 0 if the plan fits."""
        if limits is None:
            return 0.0
        pairs = zip(self.rank_bytes, limits, strict=True)
        return max(0.0, *(held - limit for held, limit in pairs))


def play(question: Question, plan: Plan, name: str) -> Candidate:
    """Simulate a step of a plan; the schedule is validated where it is used."""
    known = question.known
    pieces = cut(plan, question.batch_size)
    simulated = played(
        *(plan, pieces, training_step(plan, pieces), known.costs, question.optimizer),
        known.recomputed,
        plan_costs(plan, pieces, known),
        plan.replicated_stages if known.is_synchronised else (),
        remarks=(),
    )
    return Candidate(name, simulated, known.profile.ranks)


def calibrated(
    question: Question,
    plan: Plan,
    own_seconds: Sequence[float],
    step_seconds: float | None = None,
) -> Question:
    """Return the question with ranks and network as slow as measured steps of `plan` show.

    So a profile includes the cost of sharing the machine with other processes, which short
    measurements of components do not show.

    Args:
        own_seconds: seconds per step of each rank, without waiting for other ranks.
        step_seconds: seconds of the whole step, to adapt the network to the waiting time.
    """
    known, predicted = question.known, play(question, plan, "")
    # A rank that computes next to nothing only shows the overhead of a step.
    factors = [
        measured / expected if expected > LITTLE * predicted.seconds else 1.0
        for measured, expected in zip(own_seconds, predicted.own_seconds, strict=True)
    ]
    scaled = replace(question, known=replace(known, profile=known.profile.scaled(factors)))
    if step_seconds is None:
        return scaled
    again = play(scaled, plan, "")
    waited = step_seconds - max(own_seconds)
    expected = again.seconds - max(again.own_seconds)
    if not isinstance(known.network, MeasuredNetwork) or expected <= 0 or waited <= 0:
        return scaled
    slower = min(MOST_SLOWER, max(1 / MOST_SLOWER, waited / expected))
    network = known.network.scaled(slower)
    return replace(scaled, known=replace(scaled.known, network=network))


MOST_UNITS = 16  # groups of neighbouring ranks that a division distinguishes
MOST_PARTS = 48  # groups of neighbouring components that a division distinguishes
MOST_PLAYED = 3  # divisions that are simulated
TOLERANCE = 1e-3  # part of an estimate: far below the error of the measurements
SPREAD = 1.03  # a division whose estimate exceeds the best by this factor will not win
MANY = 1000  # components times ranks: above this, simulating one plan takes a second or more


def candidates(question: Question) -> Iterator[Candidate]:
    """Yield the plans that are worth simulating, under the names that users know."""
    names, ranks = question.known.profile.names, question.ranks
    for number in _accumulations(question):
        plan = replicated(names, ranks, number, None)
        yield play(question, plan, "single" if ranks == 1 else "dp")
    if ranks == 1:
        return
    shares = shares_of(question, tuple(range(ranks)), question.batch_size)
    if len(set(shares)) > 1:
        stage = Stage(tuple(names), tuple(range(ranks)), shares)
        yield play(question, Plan((stage,), question.microbatches or 1), "dp, unequal shares")
    staged = _staged_schedules(question)
    pipelines: list[Candidate] = []
    for usual in staged[:1]:
        named_plans = () if is_large(question) else _named_pipelines(question, usual)
        pipelines = [*named_plans, *_divisions(question, usual)]
    yield from pipelines
    if pipelines:
        best = min(
            pipelines,
            key=lambda candidate: (candidate.shortage(question.limits), candidate.seconds),
        )
        for schedule in staged[1:]:
            plan = replace(best.plan, schedule=schedule)
            yield play(question, plan, f"{best.name.split(',')[0]}, {schedule}")
    if "interleaved" in question.schedules and not is_large(question):
        yield from _interleaved(question)


def is_large(question: Question) -> bool:
    """Return whether simulating a plan takes so long that only a few are simulated."""
    return len(question.known.costs) * question.ranks > MANY


def _staged_schedules(question: Question) -> list[str]:
    """Return the requested schedules with one stage per rank, the usual one first."""
    return [name for name in ("1f1b", "gpipe", "zb-h1") if name in question.schedules]


def _accumulations(question: Question) -> list[int]:
    """Return the numbers of micro-batches for data parallelism: more than 1 only saves memory."""
    if question.microbatches:
        return [question.microbatches]
    return [1] if question.limits is None else [1, 2, 4, 8]


def _numbers_of_microbatches(question: Question) -> list[int]:
    if question.microbatches:
        return [question.microbatches]
    # The numbers that are best most often come first: their estimates rule out the others early.
    usual = (8, 16, 4, 32, 2, 64)
    return [number for number in usual if number <= question.batch_size]


def _named_pipelines(question: Question, schedule: str) -> Iterator[Candidate]:
    """Yield `mp` and `hp:SxR`, cut where the operations are even."""
    for stages in numbers_of_stages(question):
        if candidate := _pipeline(question, stages, stages, schedule):
            yield candidate


def numbers_of_stages(question: Question) -> list[int]:
    """Return the numbers of stages into which the ranks divide evenly, ascending."""
    most = min(question.ranks, len(question.known.costs))
    return [number for number in range(2, most + 1) if question.ranks % number == 0]


def _interleaved(question: Question) -> Iterator[Candidate]:
    """Yield `mp` with two stages per rank."""
    if 2 * question.ranks <= len(question.known.costs):
        candidate = _pipeline(question, question.ranks, 2 * question.ranks, "interleaved")
        if candidate is not None:
            yield candidate


def _pipeline(question: Question, groups: int, stages: int, schedule: str) -> Candidate | None:
    names, ranks = question.known.profile.names, question.ranks
    work = [cost.forward_flops for cost in question.known.costs]
    replicas = ranks // groups
    name = "mp" if replicas == 1 else f"hp:{groups}x{replicas}"
    number = question.microbatches
    plan = pipeline(names, work, ranks, stages, replicas, number, schedule, name)
    ends = [question.known.by_name[stage.components[-1]] for stage in plan.stages[:-1]]
    if not all(cost.is_differentiable for cost in ends):
        return None
    return play(question, plan, f"{name}, {schedule}")


def _divisions(question: Question, schedule: str) -> Iterator[Candidate]:
    """Yield the divisions with the best estimates, at most one per number of micro-batches."""
    divisions: list[tuple[float, int, Division]] = []
    for number in _numbers_of_microbatches(question):
        better_than = SPREAD * min((entry[0] for entry in divisions), default=UNFIT)
        division = _divided(question, schedule, number, better_than)
        if division is not None:
            divisions.append((division.seconds, number, division))
    divisions.sort(key=lambda entry: entry[0])
    for _, number, division in divisions[: 1 if is_large(question) else MOST_PLAYED]:
        if len(division.runs) > 1:
            yield play(question, _as_plan(question, division, number, schedule), "divided")


def _divided(
    question: Question, schedule: str, microbatches: int, better_than: float
) -> Division | None:
    """Return the best division for one schedule and number of micro-batches.

    Its unit is a group of neighbouring ranks and components; see `unit_of` and `places_of`.
    """
    tables, places = Tables(question, microbatches), places_of(question)
    limit = limit_of(question, schedule, microbatches)
    runs = runs_at(tables, places, None, better_than)
    # If the best division without a limit fits, it is also the best one with the limit.
    if runs is not None and limit is not None and not tables.fit(runs, limit):
        runs = runs_at(tables, places, limit, better_than)
        if runs is None and len(places) < len(tables.places):
            runs = runs_at(tables, tables.places.tolist(), limit, better_than)
    return None if runs is None else Division(runs, tables.estimate(runs))


def runs_at(
    all_tables: Tables, places: Sequence[int], limit: Limit | None, better_than: float
) -> tuple[Run, ...] | None:
    """Return the best division with boundaries at `places`, refined afterwards to all places."""
    question, microbatches = all_tables.question, all_tables.microbatches
    is_whole, unit = len(places) == len(all_tables.places), unit_of(question.ranks)
    tables = all_tables if is_whole else Tables(question, microbatches, places)

    def times_of(first: int, number: int) -> Times:
        return tables.times_of(unit * first, unit * number)

    division = divide(
        components=len(places) - 1,
        ranks=question.ranks // unit,
        microbatches=microbatches,
        times_of=times_of,
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
    return runs if is_whole else refined(runs, microbatches, all_tables.times_of, limit)


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


def _as_plan(question: Question, division: Division, microbatches: int, schedule: str) -> Plan:
    names = question.known.profile.names
    rows = -(-question.batch_size // microbatches)
    stages = []
    for run in division.runs:
        ranks = tuple(range(run.first, run.first + run.number))
        shares = shares_of(question, ranks, rows)
        stages.append(Stage(tuple(names[run.start : run.stop]), ranks, shares))
    return Plan(tuple(stages), microbatches, schedule)
