"""A profile that follows the steps of a run: components as they are measured while training."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvdtrain.parallel.cut import cut
from hvdtrain.parallel.plan import Plan
from hvdtrain.planner.components import Profile, RankTimes
from hvdtrain.planner.cost import stage_seconds
from hvdtrain.planner.tables import Question

MOST = 2.0  # by which a component may differ from what its rank does; more is a disturbance
FLOOR = 1e-4  # seconds a step: of less a clock tells nothing


def predicted_components(question: Question, plan: Plan, rank: int) -> dict[str, float]:
    """Seconds of a step, forward and backward, of each component that a rank holds."""
    pieces = cut(plan, question.batch_size)
    found = {}
    for stage in plan.stages_of(rank):
        rows = [pieces.rows(stage, rank, k) for k in range(pieces.microbatches)]
        for name in plan.stages[stage].components:
            found[name] = sum(
                stage_seconds(question.known, rank, [name], kind, each)
                for kind in ("F", "B")
                for each in rows
                if each
            )
    return found


def compared(
    question: Question, plan: Plan, measured: Sequence[Mapping[str, float]]
) -> list[dict[str, float]]:
    """How many times as long as predicted each component took, by rank.

    Args:
        measured: seconds of a step by component, of each rank.
    """
    found = []
    for rank, own in enumerate(measured):
        expected = predicted_components(question, plan, rank)
        found.append(
            {name: own[name] / expected[name] for name in own if expected.get(name, 0.0) > FLOOR}
        )
    return found


def following(question: Question, ratios: Sequence[Mapping[str, float]]) -> Question:
    """The question with components as they have shown to be beside the others of their rank.

    How fast a rank is as a whole is another matter, see `play.calibrated`. Of a component that a
    rank does not hold, what other ranks found counts.
    """
    beside = [_beside_others(own) for own in ratios]
    seen: dict[str, list[float]] = {}
    for own in beside:
        for name, ratio in own.items():
            seen.setdefault(name, []).append(ratio)
    others = {name: statistics.median(each) for name, each in seen.items()}
    profile = question.known.profile
    ranks = tuple(
        _scaled(rank, others | own) for rank, own in zip(profile.ranks, beside, strict=True)
    )
    return replace(question, known=replace(question.known, profile=Profile(ranks)))


def _beside_others(own: Mapping[str, float]) -> dict[str, float]:
    """Ratios by what is usual on their rank."""
    if not own:
        return {}
    usual = statistics.median(own.values())
    return {name: min(MOST, max(1 / MOST, ratio / usual)) for name, ratio in own.items()}


def _scaled(rank: RankTimes, factors: Mapping[str, float]) -> RankTimes:
    found = {
        name: times.times(factors[name]) if name in factors else times
        for name, times in rank.components.items()
    }
    return replace(rank, components=found)
