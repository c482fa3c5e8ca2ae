"""Plans that are worth playing through: those with names, and the best divisions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hvdtrain.parallel.plan import Plan, Stage, pipeline, replicated
from hvdtrain.planner.divide import UNFIT, Division, Run, Times, divide
from hvdtrain.planner.play import Candidate, play
from hvdtrain.planner.refine import refined
from hvdtrain.planner.tables import Question, Tables, shares_of

MOST_UNITS = 16  # of ranks
MOST_PARTS = 48  # of components
MOST_PLAYED = 3  # divisions
TOLERANCE = 1e-3  # of an estimate, far below what measurements are sure of
SPREAD = 1.03  # an estimate that is so much longer than the best will not win when played
MANY = 1000  # components times ranks: playing a plan through takes a second and more


def candidates(question: Question) -> Iterator[Candidate]:
    """Plans that are worth playing through, by the names that users know them by."""
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
    found: list[Candidate] = []
    for usual in staged[:1]:
        named = () if is_large(question) else _named_pipelines(question, usual)
        found = [*named, *_divisions(question, usual)]
    yield from found
    if found:
        best = min(found, key=lambda each: (each.shortage(question.limits), each.seconds))
        for schedule in staged[1:]:
            plan = replace(best.plan, schedule=schedule)
            yield play(question, plan, f"{best.name.split(',')[0]}, {schedule}")
    if "interleaved" in question.schedules and not is_large(question):
        yield from _interleaved(question)


def is_large(question: Question) -> bool:
    """Whether playing a plan through takes so long that few are."""
    return len(question.known.costs) * question.ranks > MANY


def _staged_schedules(question: Question) -> list[str]:
    """Of plans that hold one stage a rank, the usual one first."""
    return [name for name in ("1f1b", "gpipe", "zb-h1") if name in question.schedules]


def _accumulations(question: Question) -> list[int]:
    """Micro-batches of data parallelism: several only save memory."""
    if question.microbatches:
        return [question.microbatches]
    return [1] if question.limits is None else [1, 2, 4, 8]


def _numbers_of_microbatches(question: Question) -> list[int]:
    if question.microbatches:
        return [question.microbatches]
    # Those first that are most often best: what others cannot reach is seen soon.
    usual = (8, 16, 4, 32, 2, 64)
    return [number for number in usual if number <= question.batch_size]


def _named_pipelines(question: Question, schedule: str) -> Iterator[Candidate]:
    """`mp` and `hp:SxR`, cut where the operations are even."""
    for stages in numbers_of_stages(question):
        if found := _pipeline(question, stages, stages, schedule):
            yield found


def numbers_of_stages(question: Question) -> list[int]:
    """Into which the ranks can be shared out evenly, ascending."""
    most = min(question.ranks, len(question.known.costs))
    return [number for number in range(2, most + 1) if question.ranks % number == 0]


def _interleaved(question: Question) -> Iterator[Candidate]:
    """`mp` with two stages a rank."""
    if 2 * question.ranks <= len(question.known.costs):
        found = _pipeline(question, question.ranks, 2 * question.ranks, "interleaved")
        if found is not None:
            yield found


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
    """The best ones, by their estimates, of those for each number of micro-batches."""
    found: list[tuple[float, int, Division]] = []
    for number in _numbers_of_microbatches(question):
        better_than = SPREAD * min((each[0] for each in found), default=UNFIT)
        division = _divided(question, number, better_than)
        if division is not None:
            found.append((division.seconds, number, division))
    found.sort(key=lambda each: each[0])
    for _, number, division in found[: 1 if is_large(question) else MOST_PLAYED]:
        if len(division.runs) > 1:
            yield play(question, _as_plan(question, division, number, schedule), "divided")


def _divided(question: Question, microbatches: int, better_than: float) -> Division | None:
    """The best division in units of ranks and components, for one number of micro-batches."""
    whole, places, spare = Tables(question, microbatches), places_of(question), _spare(question)
    runs = runs_at(whole, places, None, better_than)
    # What fits without a limit is the best with one: that is known without trying depths.
    if runs is not None and spare is not None and not whole.fit(runs, spare):
        runs = runs_at(whole, places, spare, better_than)
        if runs is None and len(places) < len(whole.places):
            runs = runs_at(whole, whole.places.tolist(), spare, better_than)
    return None if runs is None else Division(runs, whole.estimate(runs))


def runs_at(
    whole: Tables, places: Sequence[int], limit: float | None, better_than: float
) -> tuple[Run, ...] | None:
    """The best division whose runs begin and end at `places`, and then wherever that is better."""
    question, microbatches = whole.question, whole.microbatches
    is_whole, unit = len(places) == len(whole.places), unit_of(question.ranks)
    tables = whole if is_whole else Tables(question, microbatches, places)

    def times_of(first: int, number: int) -> Times:
        return tables.times_of(unit * first, unit * number)

    found = divide(
        *(len(places) - 1, question.ranks // unit, microbatches, times_of),
        limit,
        tolerance=TOLERANCE,
        better_than=better_than,
    )
    if found is None:
        return None
    runs = tuple(
        Run(places[each.start], places[each.stop], unit * each.first, unit * each.number)
        for each in found.runs
    )
    return runs if is_whole else refined(whole, runs, limit)


def _spare(question: Question) -> float | None:
    """Bytes that every rank has for the model."""
    if question.limits is None:
        return None
    resident = [rank.resident_bytes for rank in question.known.profile.ranks]
    return min(limit - held for limit, held in zip(question.limits, resident, strict=True))


def places_of(question: Question) -> list[int]:
    """Between components, where a division is looked for: everywhere, where there are few."""
    components = len(question.known.costs)
    if components <= MOST_PARTS:
        return list(range(components + 1))
    each = question.known.profile.ranks[0].each
    rows = question.batch_size // question.ranks or 1
    done = np.cumsum(each.forward(rows) + each.backward(rows))
    wanted = done[-1] * np.arange(1, MOST_PARTS) / MOST_PARTS
    return sorted({0, components, *(int(np.argmin(abs(done - part))) + 1 for part in wanted)})


def unit_of(ranks: int) -> int:
    """How many neighbouring ranks a division keeps together: one, where there are few ranks."""
    return next(
        size for size in range(1, ranks + 1) if not ranks % size and ranks // size <= MOST_UNITS
    )


def _as_plan(question: Question, found: Division, microbatches: int, schedule: str) -> Plan:
    names = question.known.profile.names
    rows = -(-question.batch_size // microbatches)
    stages = []
    for run in found.runs:
        ranks = tuple(range(run.first, run.first + run.number))
        shares = shares_of(question, ranks, rows)
        stages.append(Stage(tuple(names[run.start : run.stop]), ranks, shares))
    return Plan(tuple(stages), microbatches, schedule)
