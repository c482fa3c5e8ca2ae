"""Which rank holds the others up, and what that costs: found from what all ranks tell each other.

Ranks that wait for one another take equally long for a step; what tells them apart is the time
that each spends without waiting. It is compared with that of the other replicas of the same
stages, and where there are none with the rank's own best so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdtrain.parallel.plan import Plan
from hvdtrain.training.control import Vitals

FACTOR = 1.5  # of what is expected
SMALLEST_SECONDS = 1e-3  # a step; below it other work on the machine decides
FEWEST_STEPS = 5  # that a judgement rests on
TIMES = 2  # in a row, before a rank is named


@dataclass(frozen=True)
class Straggler:
    """A rank that takes longer than expected.

    Attributes:
        own_seconds, expected_seconds: of a step, without waiting; medians.
        lost_fraction: of the step, that the job would win if the rank were as fast as expected.
    """

    rank: int
    own_seconds: float
    expected_seconds: float
    lost_fraction: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} holds the others up: {1e3 * self.own_seconds:.1f} ms a step of its "
            f"own, {1e3 * self.expected_seconds:.1f} ms expected; this costs "
            f"{100 * self.lost_fraction:.0f} % of each step"
        )


class Stragglers:
    """Follows the ranks from one window of steps to the next.

    Args:
        peers: for each rank the others that have the same work.
    """

    def __init__(self, peers: Sequence[Sequence[int]]) -> None:
        self.peers = peers
        self.best = np.full(len(peers), np.inf)
        self.slow = np.zeros(len(peers), np.int64)  # judgements in a row
        self.unjudged: list[NDArray[np.float64]] = []

    def look(self, vitals: NDArray[np.float64]) -> list[Straggler]:
        """Take a window [steps, ranks, Vitals]; the ranks that now have been slow long enough.

        Each is named once, and again only after it has recovered.
        """
        if len(self.peers) < 2:
            return []
        self.unjudged.append(vitals)
        if sum(map(len, self.unjudged)) < FEWEST_STEPS:
            return []
        seconds, own = np.median(np.concatenate(self.unjudged), axis=0).T[:2]
        self.unjudged.clear()
        expected = np.array(
            [
                np.median(own[list(others)]) if others else self.best[rank]
                for rank, others in enumerate(self.peers)
            ]
        )
        self.best = np.minimum(self.best, own)
        excess = own - expected
        is_slow = (own > FACTOR * expected) & (excess > SMALLEST_SECONDS)
        self.slow = np.where(is_slow, self.slow + 1, 0)
        return [
            Straggler(
                *(int(rank), float(own[rank]), float(expected[rank])),
                lost_fraction=float(min(1.0, excess[rank] / max(seconds[rank], 1e-9))),
            )
            for rank in np.flatnonzero(self.slow == TIMES)
        ]


def peers(plan: Plan, size: int) -> list[tuple[int, ...]]:
    """For each rank the others that hold the same stages, with the same share of each batch."""

    def work(rank: int) -> list[tuple[int, int]]:
        return [
            (number, stage.shares[stage.ranks.index(rank)])
            for number, stage in enumerate(plan.stages)
            if rank in stage.ranks
        ]

    works = [work(rank) for rank in range(size)]
    return [
        tuple(other for other in range(size) if other != rank and works[other] == works[rank])
        for rank in range(size)
    ]


def as_lists(vitals: NDArray[np.float64]) -> dict[str, list[float | None]]:
    """The medians over a window [steps, ranks, Vitals], by rank: what a step line says of them."""
    medians = np.median(vitals, axis=0).T
    return {
        name: [None if np.isnan(value) else round(float(value), 6) for value in values]
        for name, values in zip(Vitals._fields, medians, strict=True)
        if name != "seconds"
    }
