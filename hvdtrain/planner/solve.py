"""Chooses a plan: divisions for each number of micro-batches, played through; the shortest wins.

The division (`divide`) is exact for its estimate. The estimate leaves out what only a schedule
shows (waits of stages that are unlike, a bubble that weight gradients fill), so that the best
division for each number of micro-batches, and the plans that users know by name, are played
through with all costs, and the shortest of those that fit is chosen.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.parallel.plan import Plan
from hvdtrain.planner.candidates import candidates
from hvdtrain.planner.overview import OPTIMIZER_COPIES, copies_held
from hvdtrain.planner.play import Candidate
from hvdtrain.planner.tables import Question

if TYPE_CHECKING:
    from hvdtrain.models.costs import ComponentCost

BETTER = 0.985  # a plan has to be so much shorter than a simpler one to be preferred
GIB = 2**30


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
    allowed = [each for each in candidates(question) if question.allows(each.plan)]
    if not allowed:
        raise UsageError("every other one changes over which samples batch norm normalises")
    played = {each.plan: each for each in reversed(allowed)}
    fitting = [each for each in played.values() if not each.shortage(question.limits)]
    if not fitting:
        raise UsageError(_nothing_fits(question, list(played.values())))
    ordered = sorted(fitting, key=lambda each: each.seconds)
    close = [each for each in fitting if BETTER * each.seconds <= ordered[0].seconds]
    chosen = min(close, key=lambda each: (_parts(each.plan), each.seconds))
    return Solution(chosen, tuple(ordered), lower_bound(question))


def _parts(plan: Plan) -> int:
    """How much there is to a plan: of two that are as fast the simpler is better."""
    shares_differ = any(len(set(stage.shares)) > 1 for stage in plan.stages)
    return 2 * len(plan.stages) * plan.microbatches + shares_differ


def lower_bound(question: Question) -> float:
    """Seconds that no plan can be shorter than: all samples, all components, nobody waiting.

    A sample takes of each component at least the fewest seconds that it takes on any rank, at
    whatever number of samples; a rank is at most as fast as where it is closest to that.
    """
    again = question.known.recomputed
    rates = [
        [
            part.forward.least_each * (2 if name in again else 1) + part.backward.least_each
            for name, part in rank.components.items()
        ]
        for rank in question.known.profile.ranks
    ]
    least = [max(min(of_component), 1e-15) for of_component in zip(*rates, strict=True)]
    speed: float = sum(
        max(fewest / max(own, 1e-15) for fewest, own in zip(least, rank, strict=True))
        for rank in rates
    )
    return float(question.batch_size * sum(least) / speed)


def _nothing_fits(question: Question, played: "list[Candidate]") -> str:
    """Which component is too large for every rank, or what the plan that lacks least lacks."""
    limits = question.limits or ()
    room = max(
        limit - rank.resident_bytes
        for limit, rank in zip(limits, question.known.profile.ranks, strict=True)
    )
    optimizer = question.optimizer
    copies = 2 + OPTIMIZER_COPIES[optimizer] + copies_held(optimizer, replicas=1)

    def held(cost: "ComponentCost") -> float:
        return copies * cost.parameter_bytes + cost.buffer_bytes + cost.saved_bytes

    largest = max(question.known.costs, key=held)
    if held(largest) > room:
        return (
            f"no plan fits: {largest.name} alone needs {held(largest) / GIB:.2f} GiB, "
            f"{(held(largest) - room) / GIB:.2f} more than a rank has left of its limit: "
            "raise the limit (--memory-limit)"
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
        f"{lacking / GIB:.2f} GiB, most of it for {heaviest}: raise the limit (--memory-limit), "
        "use --recompute all, a smaller --batch-size or more ranks"
    )
