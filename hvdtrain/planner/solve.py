"""Chooses a plan: simulates divisions for each number of micro-batches and picks the fastest.

The division (`divide`) is exact for its estimate. The estimate leaves out effects of the schedule:
waiting of unequal stages, and a bubble that weight gradients fill. So the best division for each
number of micro-batches, the best plans in which a rank may be in several stages (`assign`), and
the plans that users know by name, are simulated with all costs, and the fastest that fits is
chosen. Of few components and ranks, all divisions into two stages are simulated, too, and plans
around the fastest one, which differ from it in the ranks of a stage or of its ends.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.host.process import collection_paused
from hvdtrain.plan.plan import Plan, Stage, pipeline, replicated
from hvdtrain.planner.assign import SCHEDULE, assigned_plans, groups_of
from hvdtrain.planner.candidate import Candidate, play
from hvdtrain.planner.cost import Question
from hvdtrain.planner.divide import divisions, plan_of, shares_of
from hvdtrain.planner.memory import GIB, activation_bytes, lasting_bytes, process_bytes

if TYPE_CHECKING:
    from hvdtrain.models.costs import ComponentCost

MOST_PLAYED = 3  # divisions that are simulated
MOST_MIXED = 6  # plans of any mix that are simulated, for each number of micro-batches
SIMULATED = 600  # of them times components times ranks, at most
ESTIMATED = 0.9  # part of its estimate below which a plan of any mix is seldom simulated
MIXED_MICROBATCHES = (1, 2, 4, 8)
SMALL = 48  # components times ranks, at most: many plans can be simulated
FEW_MICROBATCHES = (1, 2)
MOST_AROUND = 60  # plans that are simulated around the fastest one
MOST_MICROBATCHES = 1024  # in a suggestion
MANY = 1000  # components times ranks: above this, simulating one plan takes a second or more
SHOWN = 5  # candidates to list beside the chosen one
BETTER = 0.985  # a plan is preferred to a simpler one only if its time is less than this part


@dataclass(frozen=True)
class Solution:
    """The chosen plan and the candidates.

    Attributes:
        candidates: all candidates that fit, the fastest first.
        bound: lower bound in seconds for any plan on these ranks.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    bound: float

    @property
    def gap(self) -> float:
        """Return by how much the chosen plan exceeds the bound, as a part of the bound."""
        return self.chosen.seconds / self.bound - 1 if self.bound else 0.0

    def reasons(self) -> list[str]:
        """Return lines that compare the chosen plan with the others and with the lower bound."""
        chosen = self.chosen
        lines = [
            f"chosen: {chosen.name}, {1e3 * chosen.seconds:.2f} ms per step predicted; computing "
            f"alone, in equal parts, would take {1e3 * self.bound:.2f} ms"
        ]
        others = [candidate for candidate in self.candidates if candidate.plan != chosen.plan]
        for other in others[:SHOWN]:
            lines.append(
                f"  {other.name} ({len(other.plan.stages)} stage(s), {other.plan.microbatches} "
                f"micro-batch(es), {other.plan.schedule}): {1e3 * other.seconds:.2f} ms, "
                f"{_why_slower(chosen, other)}"
            )
        return lines


def _why_slower(chosen: Candidate, other: Candidate) -> str:
    """Return why another plan is slower."""
    more = other.seconds / chosen.seconds - 1
    bubble = other.timeline.bubble_fraction
    best = chosen.timeline.bubble_fraction
    if abs(more) < 0.0005:
        return "as fast"
    if more < 0:
        return f"{-more:.1%} faster, but more complex"
    if bubble > best + 0.01:
        return f"{more:.1%} slower: its ranks wait {bubble:.1%} of the step instead of {best:.1%}"
    return f"{more:.1%} slower"


def solve(question: Question) -> Solution:
    """Return the plan with the shortest predicted step among those that fit.

    Raises:
        UsageError: if nothing fits, naming the component and the shortage.
    """
    with collection_paused():
        allowed = [one for one in candidates(question) if question.allows(one.plan)]
    if not allowed:
        raise UsageError("every other plan changes over which samples batch norm normalises")
    played = {candidate.plan: candidate for candidate in reversed(allowed)}
    fitting = [
        candidate for candidate in played.values() if not candidate.shortage(question.limits)
    ]
    if not fitting:
        raise UsageError(_nothing_fits(question, list(played.values())))
    ordered = sorted(fitting, key=lambda candidate: candidate.seconds)
    close = [
        candidate for candidate in fitting if BETTER * candidate.seconds <= ordered[0].seconds
    ]
    chosen = min(close, key=lambda candidate: (_complexity(candidate.plan), candidate.seconds))
    return Solution(chosen, tuple(ordered), lower_bound(question))


def _complexity(plan: Plan) -> int:
    """Return the complexity of a plan: the simpler of two equally fast plans is better."""
    shares_differ = any(len(set(stage.shares)) > 1 for stage in plan.stages)
    return 2 * len(plan.stages) * plan.microbatches + shares_differ


def candidates(question: Question) -> Iterator[Candidate]:
    """Yield the plans that are worth simulating, under the names that users know."""
    fitting: list[Candidate] = []

    def judged(group: Iterable[Candidate]) -> Iterator[Candidate]:
        for candidate in group:
            if question.allows(candidate.plan) and not candidate.shortage(question.limits):
                fitting.append(candidate)
            yield candidate

    yield from judged(_named_candidates(question))
    if question.ranks == 1 or SCHEDULE not in question.schedules:
        return
    size = len(question.known.costs) * question.ranks
    if size <= SMALL:
        yield from judged(_in_two(question))
    tried = MIXED_MICROBATCHES[:: 2 if is_large(question) else 1]
    if question.microbatches:
        tried = (question.microbatches,)
    most = max(1, min(MOST_MIXED, SIMULATED // size))
    for number in tried:
        if number > question.batch_size:
            continue
        fastest = min((candidate.seconds for candidate in fitting), default=math.inf)
        plans = assigned_plans(question, number, most, below=fastest / ESTIMATED)
        yield from judged(play(question, plan, "mixed") for plan in plans)
    if size <= SMALL and fitting:
        yield from _around(question, fitting)


def _in_two(question: Question) -> Iterator[Candidate]:
    """Yield the divisions into two stages of neighbouring ranks, with few micro-batches."""
    components, ranks = len(question.known.costs), question.ranks
    numbers = (question.microbatches,) if question.microbatches else FEW_MICROBATCHES
    for number, place, first in product(numbers, range(1, components), range(1, ranks)):
        if question.known.costs[place - 1].is_differentiable and number <= question.batch_size:
            groups = tuple(range(first)), tuple(range(first, ranks))
            runs = zip((0, place), (place, components), groups, strict=True)
            yield play(question, plan_of(question, runs, number, SCHEDULE), "divided")


def _around(question: Question, known: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield plans with other ranks for a part of the fastest one, then around faster ones."""
    best = min(known, key=lambda candidate: candidate.seconds)
    seen = {candidate.plan for candidate in known}
    most = len(seen) + MOST_AROUND
    while fresh := [plan for plan in _neighbours(question, best.plan) if plan not in seen]:
        for plan in fresh[: most - len(seen)]:
            seen.add(plan)
            candidate = play(question, plan, "mixed")
            yield candidate
            if candidate.seconds < best.seconds and not candidate.shortage(question.limits):
                best = candidate
                break
        else:
            return


def _neighbours(question: Question, plan: Plan) -> list[Plan]:
    """Return the allowed plans in which a stage, or a component at its ends, has other ranks."""
    path = [stage.ranks for stage in plan.stages for _ in stage.components]
    plans: dict[Plan, None] = {}
    stop = 0
    for stage in plan.stages:
        start, stop = stop, stop + len(stage.components)
        spans = [(start, stop), (start, start + 1), (stop - 1, stop)]
        spans += [(max(0, start - 1), stop), (start, min(stop + 1, len(path)))]
        for (first, end), ranks in product(dict.fromkeys(spans), groups_of(question.ranks)):
            changed = [*path[:first], *[ranks] * (end - first), *path[end:]]
            cuts = [place for place in range(1, len(path)) if changed[place - 1] != changed[place]]
            is_whole = {rank for one in changed for rank in one} == set(range(question.ranks))
            if is_whole and all(question.known.costs[cut - 1].is_differentiable for cut in cuts):
                runs = [(a, b, changed[a]) for a, b in pairwise([0, *cuts, len(path)])]
                plans[plan_of(question, runs, plan.microbatches, SCHEDULE)] = None
    return [plan for plan in plans if question.allows(plan)]


def _named_candidates(question: Question) -> Iterator[Candidate]:
    names, ranks = question.known.profile.names, question.ranks
    for number in _accumulations(question):
        plan = replicated(names, ranks, number, None)
        alike = play(question, plan, "single" if ranks == 1 else "dp")
        yield alike
        if not alike.shortage(question.limits):
            break
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
        plans = divisions(
            question,
            usual,
            _numbers_of_microbatches(question),
            most=1 if is_large(question) else MOST_PLAYED,
        )
        pipelines = [*named_plans, *(play(question, plan, "divided") for plan in plans)]
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
    # More of them need less memory, and a longer step.
    return [1] if question.limits is None else [1, 2, 4, 8, 16, 32, 64]


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


def lower_bound(question: Question) -> float:
    """Return seconds that no plan can beat: all samples, all components, no waiting.

    Each sample takes at least the fewest seconds per sample that a component takes on any rank, at
    any number of samples. A rank is at most as fast as for the component at which it is closest to
    that.
    """
    known = question.known
    forwards = np.array([1 + (name in known.recomputed) for name in known.profile.names])
    alike = {id(rank): rank.arrays for rank in known.profile.ranks}
    rates = {
        key: np.maximum(
            forwards * times.forward.least_per_unit + times.backward.least_per_unit, 1e-15
        )
        for key, times in alike.items()
    }
    least = np.min(list(rates.values()), axis=0)
    speed = sum(float((least / rates[id(rank)]).max()) for rank in known.profile.ranks)
    return float(question.batch_size * least.sum() / speed)


def ways_out(question: Question, plan: Plan, limits: Sequence[float]) -> list[str]:
    """Return the options with which a plan keeps its limits, with the GiB that it then needs.

    Args:
        limits: bytes by rank, which may differ from those of the question.
    """
    ways = []
    fewest = plan.microbatches
    while (number := 2 * fewest) <= min(question.batch_size, MOST_MICROBATCHES):
        tried = play(question, replace(plan, microbatches=number), "")
        if tried.cut.microbatches < number:
            break
        fewest = number
        if not tried.shortage(limits):
            ways.append(f"--microbatches {number} would need {_gib(max(tried.rank_bytes))}")
            break
    names = question.known.profile.names
    if not plan.splits_backward and set(question.known.recomputed) < set(names):
        known = replace(question.known, recomputed=names)
        tried = play(replace(question, known=known), plan, "")
        if not tried.shortage(limits):
            ways.append(f"--recompute all would need {_gib(max(tried.rank_bytes))}")
    return ways


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def _nothing_fits(question: Question, played: list[Candidate]) -> str:
    """Return the message that names the component or the rank that does not fit."""
    limits, ranks = question.limits or (), question.known.profile.ranks
    left = [limit - rank.resident_bytes for limit, rank in zip(limits, ranks, strict=True)]
    fullest = int(np.argmin(left))
    if left[fullest] <= 0:
        return (
            f"no plan fits: the process of rank {fullest} alone holds "
            f"{_gib(ranks[fullest].resident_bytes)}, and only {_gib(limits[fullest])} are allowed "
            "after the reserve: raise the limit of --plan"
        )
    emptiest = int(np.argmax(left))
    # The most micro-batches that a plan has here: each of them has the fewest samples.
    rows = -(-question.batch_size // max(one.plan.microbatches for one in played))

    def needed(cost: "ComponentCost") -> int:
        return process_bytes(
            lasting=lasting_bytes([cost], question.optimizer, replicas=1),
            activations=activation_bytes([cost], rows, question.known.recomputed),
            resident=0,
            factor=ranks[emptiest].activation_factor,
        )

    largest = max(question.known.costs, key=needed)
    if needed(largest) > left[emptiest]:
        return (
            f"no plan fits: {largest.name} alone needs {_gib(needed(largest))}, "
            f"{_gib(needed(largest) - left[emptiest])} more than any rank has left: "
            "raise the limit of --plan"
        )
    closest = min(played, key=lambda candidate: candidate.shortage(limits))
    fullest = int(np.argmax([a - b for a, b in zip(closest.rank_bytes, limits, strict=True)]))
    there = [cost for stage in closest.plan.stages_of(fullest) for cost in closest.costs_of(stage)]
    ways = ways_out(question, closest.plan, limits) or [
        "raise the limit of --plan, use a smaller --batch-size or more ranks"
    ]
    return (
        f"no plan fits: the closest, {closest.name}, lacks {_gib(closest.shortage(limits))} on "
        f"rank {fullest}, mostly for {max(there, key=needed).name}: {', '.join(ways)}"
    )
