"""Adapts a profile to the steps of a run: components as they are measured while training."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvdtrain.parallel.cut import cut
from hvdtrain.parallel.plan import Plan
from hvdtrain.planner.components import Profile, RankTimes
from hvdtrain.planner.cost import stage_seconds
from hvdtrain.planner.tables import Question

MOST = 2.0  # a component may deviate from its rank by this factor; more is a disturbance
FLOOR = 1e-4  # seconds per step: less is below the accuracy of the clock


def predicted_components(question: Question, plan: Plan, rank: int) -> dict[str, float]:
    """Return the seconds per step, forward and backward, of each component that a rank holds."""
    pieces = cut(plan, question.batch_size)
    seconds = {}
    for stage in plan.stages_of(rank):
        rows = [pieces.rows(stage, rank, k) for k in range(pieces.microbatches)]
        for name in plan.stages[stage].components:
            seconds[name] = sum(
                stage_seconds(question.known, rank, [name], kind, count)
                for kind in ("F", "B")
                for count in rows
                if count
            )
    return seconds


def compared(
    question: Question, plan: Plan, measured: Sequence[Mapping[str, float]]
) -> list[dict[str, float]]:
    """Return the measured time of each component divided by the predicted one, by rank.

    Args:
        measured: seconds per step by component, for each rank.
    """
    ratios = []
    for rank, seconds in enumerate(measured):
        expected = predicted_components(question, plan, rank)
        ratios.append(
            {
                name: seconds[name] / expected[name]
                for name in seconds
                if expected.get(name, 0.0) > FLOOR
            }
        )
    return ratios


def following(question: Question, ratios: Sequence[Mapping[str, float]]) -> Question:
    """Return the question with components adapted to their measured ratios on each rank.

    Ratios count relative to the median of their rank. How fast a rank is as a whole is up to
    `play.calibrated`. A component that a rank does not hold gets the median of the ranks that hold
    it.
    """
    relative = [_relative_ratios(rank_ratios) for rank_ratios in ratios]
    seen: dict[str, list[float]] = {}
    for rank_ratios in relative:
        for name, ratio in rank_ratios.items():
            seen.setdefault(name, []).append(ratio)
    others = {name: statistics.median(values) for name, values in seen.items()}
    profile = question.known.profile
    ranks = tuple(
        _scaled(rank, others | rank_ratios)
        for rank, rank_ratios in zip(profile.ranks, relative, strict=True)
    )
    return replace(question, known=replace(question.known, profile=Profile(ranks)))


def _relative_ratios(ratios: Mapping[str, float]) -> dict[str, float]:
    """Return the ratios of a rank relative to their median."""
    if not ratios:
        return {}
    median = statistics.median(ratios.values())
    return {name: min(MOST, max(1 / MOST, ratio / median)) for name, ratio in ratios.items()}


def _scaled(rank: RankTimes, factors: Mapping[str, float]) -> RankTimes:
    components = {
        name: times.times(factors[name]) if name in factors else times
        for name, times in rank.components.items()
    }
    return replace(rank, components=components)
