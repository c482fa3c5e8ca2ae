"""Memory limits: the margin that the planner keeps, and the options with which a plan would fit.

The margin has three parts. Each rank is taken to need as much as the rank that needed most: all
run the same program, so that a difference between their measurements is chance. Activations count
with the larger of two measured factors. And RESERVE is kept free for memory that is not measured
before a run, such as blocks that the allocator cannot reuse.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.plan.plan import Plan
from hvdtrain.planner.candidate import Candidate, play
from hvdtrain.planner.cost import Question
from hvdtrain.planner.memory import (
    GIB,
    RESERVE,
    activation_bytes,
    lasting_bytes,
    process_bytes,
)
from hvdtrain.planner.profile import Profile

if TYPE_CHECKING:
    from hvdtrain.models.costs import ComponentCost

MOST_MICROBATCHES = 1024  # in a suggestion


def with_margin(profile: Profile) -> Profile:
    """Return the profile with the memory of the rank that needed most, on all ranks."""
    ranks = profile.ranks
    resident = max(rank.resident_bytes for rank in ranks)
    factor = max(rank.activation_factor + rank.activation_spread for rank in ranks)
    changed = {
        id(rank): replace(
            rank, resident_bytes=resident, activation_factor=factor, activation_spread=0.0
        )
        for rank in ranks
    }
    return Profile(tuple(changed[id(rank)] for rank in ranks))


def planned_limits(limit_gib: float, ranks: int) -> tuple[float, ...]:
    """Return the bytes that a plan may use on each rank under --memory-limit."""
    return ((1 - RESERVE) * limit_gib * GIB,) * ranks


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
            ways.append(f"--microbatches {number} would need {_gib(tried)}")
            break
    names = question.known.profile.names
    if not plan.splits_backward and set(question.known.recomputed) < set(names):
        known = replace(question.known, recomputed=names)
        tried = play(replace(question, known=known), plan, "")
        if not tried.shortage(limits):
            ways.append(f"--recompute all would need {_gib(tried)}")
    return ways


def advice(ways: Sequence[str], otherwise: str) -> str:
    """Return what to do about a plan that exceeds its limit."""
    return ", ".join(ways) if ways else otherwise


def _gib(candidate: Candidate) -> str:
    return f"{max(candidate.rank_bytes) / GIB:.2f} GiB"


def nothing_fits(question: Question, played: list[Candidate]) -> str:
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
    return _closest(question, played, lambda name: needed(question.known.by_name[name]))


def _closest(question: Question, played: list[Candidate], needed: Callable[[str], float]) -> str:
    """Return the message that names the plan closest to fitting; `needed` is by component."""
    limits = question.limits or ()
    closest = min(played, key=lambda candidate: candidate.shortage(limits))
    lacking = closest.shortage(limits)
    fullest = int(np.argmax([a - b for a, b in zip(closest.rank_bytes, limits, strict=True)]))
    held_there = [
        name
        for stage in closest.plan.stages_of(fullest)
        for name in closest.plan.stages[stage].components
    ]
    heaviest = max(held_there, key=needed)
    what = advice(
        ways_out(question, closest.plan, limits),
        "raise --memory-limit, use a smaller --batch-size or more ranks",
    )
    return (
        f"no plan fits: the closest, {closest.name}, lacks {lacking / GIB:.2f} GiB on rank "
        f"{fullest}, mostly for {heaviest}: {what}"
    )
