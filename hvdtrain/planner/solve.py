"""Chooses a plan: simulates divisions for each number of micro-batches and picks the fastest.

The division (`divide`) is exact for its estimate. The estimate leaves out effects of the schedule:
waiting of unequal stages, and a bubble that weight gradients fill. So the best division for each
number of micro-batches, and the plans that users know by name, are simulated with all costs, and
the fastest plan that fits is chosen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.plan.plan import Plan
from hvdtrain.planner.candidates import Candidate, candidates
from hvdtrain.planner.cost import activation_bytes, lasting_bytes, process_bytes
from hvdtrain.planner.tables import Question

if TYPE_CHECKING:
    from hvdtrain.models.costs import ComponentCost

BETTER = 0.985  # a plan is preferred to a simpler one only if its time is less than this part
GIB = 2**30


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


def solve(question: Question) -> Solution:
    """Return the plan with the shortest predicted step among those that fit.

    Raises:
        UsageError: if nothing fits, naming the component and the shortage.
    """
    allowed = [candidate for candidate in candidates(question) if question.allows(candidate.plan)]
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


def lower_bound(question: Question) -> float:
    """Return seconds that no plan can beat: all samples, all components, no waiting.

    Each sample takes at least the fewest seconds per sample that a component takes on any rank, at
    any number of samples. A rank is at most as fast as for the component at which it is closest to
    that.
    """
    again = question.known.recomputed
    rates = [
        [
            part.forward.least_per_unit * (2 if name in again else 1)
            + part.backward.least_per_unit
            for name, part in rank.components.items()
        ]
        for rank in question.known.profile.ranks
    ]
    least = [max(min(of_component), 1e-15) for of_component in zip(*rates, strict=True)]
    speed: float = sum(
        max(fewest / max(seconds, 1e-15) for fewest, seconds in zip(least, rank, strict=True))
        for rank in rates
    )
    return float(question.batch_size * sum(least) / speed)


def _nothing_fits(question: Question, played: "list[Candidate]") -> str:
    """Return the message that names the component or the rank that does not fit."""
    limits, ranks = question.limits or (), question.known.profile.ranks
    left = [limit - rank.resident_bytes for limit, rank in zip(limits, ranks, strict=True)]
    fullest = int(np.argmin(left))
    if left[fullest] <= 0:
        return (
            f"no plan fits: the process of rank {fullest} alone holds "
            f"{ranks[fullest].resident_bytes / GIB:.2f} GiB, and only "
            f"{limits[fullest] / GIB:.2f} GiB are allowed after the reserve: raise --memory-limit"
        )
    emptiest = int(np.argmax(left))
    # The most micro-batches that a plan has here: each of them has the fewest samples.
    most = max(candidate.plan.microbatches for candidate in played)
    rows = -(-question.batch_size // most)

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
            f"no plan fits: {largest.name} alone needs {needed(largest) / GIB:.2f} GiB, "
            f"{(needed(largest) - left[emptiest]) / GIB:.2f} GiB more than any rank has left: "
            "raise --memory-limit"
        )
    return _closest(limits, played, lambda name: needed(question.known.by_name[name]))


def _closest(
    limits: Sequence[float], played: "list[Candidate]", needed: Callable[[str], float]
) -> str:
    """Return the message that names the plan closest to fitting; `needed` is by component."""
    closest = min(played, key=lambda candidate: candidate.shortage(limits))
    lacking = closest.shortage(limits)
    fullest = int(np.argmax([a - b for a, b in zip(closest.rank_bytes, limits, strict=True)]))
    held_there = [
        name
        for stage in closest.plan.stages_of(fullest)
        for name in closest.plan.stages[stage].components
    ]
    heaviest = max(held_there, key=needed)
    return (
        f"no plan fits: the closest, {closest.name}, lacks {lacking / GIB:.2f} GiB on rank "
        f"{fullest}, mostly for {heaviest}: raise --memory-limit, use --recompute all, "
        "a smaller --batch-size or more ranks"
    )
