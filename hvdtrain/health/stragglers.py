"""Detection of stragglers, falling throughput and waiting for data, from the vitals of all ranks.

Ranks that wait for one another take equally long for a step; they differ in the time that they
spend without waiting. A rank's time is compared with that of the other replicas of its stages, or,
if there are none, with its own best time so far.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hvdtrain.engine.progress import Vitals
from hvdtrain.plan.plan import Plan

FACTOR = 1.5  # a straggler takes more than this times the expected seconds
SMALLEST_SECONDS = 1e-3  # per step; smaller differences come from other work on the machine
FEWEST_STEPS = 5  # steps of one judgement
# Judgements in a row before a rank is named; this many times more before it is named again, since
# other processes may disturb a run again and again.
TIMES, LONGER = 2, 4
# Throughput has fallen below this part of its median, or this part of a step waits for data, in
# as many judgements in a row, each of steps that take a second or longer.
FALLEN, WAITING, LASTING = 0.6, 0.3, 3
LEAST_SECONDS = 1.0
FEWEST, MOST = 5, 50  # judgements for a median


@dataclass(frozen=True)
class Straggler:
    """A rank that takes longer than expected.

    Attributes:
        own_seconds, expected_seconds: median seconds per step, without waiting.
        lost_fraction: part of each step that the job would save if the rank were as fast as
            expected.
    """

    rank: int
    own_seconds: float
    expected_seconds: float
    lost_fraction: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: {1e3 * self.own_seconds:.1f} ms per step without waiting, "
            f"{1e3 * self.expected_seconds:.1f} ms expected; this costs "
            f"{100 * self.lost_fraction:.0f} % of each step"
        )


class Stragglers:
    """Follows the ranks from one window of steps to the next.

    Args:
        groups: all ranks once, those with the same work together.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = [np.array(group) for group in groups]
        size = sum(map(len, groups))
        self.best = np.full(size, np.inf)
        self.slow = np.zeros(size, np.int64)  # judgements in a row
        self.needed = np.full(size, TIMES)
        self.unjudged: list[NDArray[np.float64]] = []

    def look(self, vitals: NDArray[np.float64]) -> list[Straggler]:
        """Take a window [steps, ranks, Vitals]; return the ranks that are stragglers from now on.

        A rank is returned once, and again when it has been slow LONGER times more often.
        """
        if len(self.best) < 2:
            return []
        self.unjudged.append(vitals)
        if sum(map(len, self.unjudged)) < FEWEST_STEPS:
            return []
        seconds, own_seconds = np.median(np.concatenate(self.unjudged), axis=0).T[:2]
        self.unjudged.clear()
        expected = self.best.copy()
        for group in self.groups:
            if len(group) > 1:
                expected[group] = medians_of_others(own_seconds[group])
        self.best = np.minimum(self.best, own_seconds)
        excess = own_seconds - expected
        is_slow = (own_seconds > FACTOR * expected) & (excess > SMALLEST_SECONDS)
        self.slow = np.where(is_slow, self.slow + 1, 0)
        named = np.flatnonzero(self.slow == self.needed)
        self.needed[named] *= LONGER
        return [
            Straggler(
                rank=int(rank),
                own_seconds=float(own_seconds[rank]),
                expected_seconds=float(expected[rank]),
                lost_fraction=float(min(1.0, excess[rank] / max(seconds[rank], 1e-9))),
            )
            for rank in named
        ]


@dataclass
class Trends:
    """Follows the throughput of a run, and how long it waits for data.

    Attributes:
        rates: images/s of the last judgements, without those that are fallen.
        unjudged: steps, images, seconds, and seconds of a rank's waiting for data, that are not
            judged yet.
        fallen, waiting: judgements in a row.
    """

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=MOST))
    unjudged: NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    fallen: int = 0
    waiting: int = 0

    def look(self, images: int, seconds: float, vitals: NDArray[np.float64]) -> dict[str, str]:
        """Take a window [steps, ranks, Vitals]; return what is wrong from now on, by its cause.

        Args:
            images: of the window, over all ranks.
            seconds: of the window.
        """
        waited = float(vitals[..., DATA].mean(axis=1).sum())
        self.unjudged += (len(vitals), images, seconds, waited)
        steps, images_so_far, seconds_so_far, waited = self.unjudged.tolist()
        if steps < FEWEST_STEPS or seconds_so_far < LEAST_SECONDS:
            return {}
        self.unjudged[:] = 0
        rate, share = images_so_far / seconds_so_far, waited / seconds_so_far
        usual = float(np.median(self.rates)) if len(self.rates) >= FEWEST else 0.0
        is_fallen = rate < FALLEN * usual
        self.fallen = self.fallen + 1 if is_fallen else 0
        self.waiting = self.waiting + 1 if share > WAITING else 0
        if not is_fallen:
            self.rates.append(rate)
        faults = {}
        if self.fallen == LASTING:
            faults["throughput fell"] = (
                f"throughput fell to {rate:,.0f} images/s, {rate / usual:.0%} of the usual "
                f"{usual:,.0f}"
            )
        if self.waiting == LASTING:
            faults["waiting for data"] = (
                f"ranks wait for data {share:.0%} of the time: stage the data set on a local disk "
                "(--stage), or use larger shards"
            )
        return faults


def medians_of_others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each of two values or more the median of the others; sorts once."""
    places = np.argsort(values, kind="stable")
    ordered, others = values[places], len(values) - 1
    numbers = np.arange(len(values))

    def other(number: int) -> NDArray[np.float64]:
        """Return for each value the one of this number among the others, in order."""
        chosen: NDArray[np.float64] = ordered[number + (numbers <= number)]
        return chosen

    medians = np.empty(len(values))
    medians[places] = (other((others - 1) // 2) + other(others // 2)) / 2
    return medians


def groups_of_equal_work(plan: Plan, size: int) -> list[tuple[int, ...]]:
    """Return all ranks, those with the same stages and the same share of each batch together."""
    works: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(size)}
    for number, stage in enumerate(plan.stages):
        for rank, share in zip(stage.ranks, stage.shares, strict=True):
            works[rank].append((number, share))
    groups: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank, work in works.items():
        groups.setdefault(tuple(work), []).append(rank)
    return [tuple(group) for group in groups.values()]


def as_lists(vitals: NDArray[np.float64]) -> dict[str, list[float | None]]:
    """Return the medians over a window [steps, ranks, Vitals], by rank, for a step line."""
    medians = np.median(vitals, axis=0).T
    return {
        name: [None if np.isnan(value) else round(float(value), 6) for value in values]
        for name, values in zip(Vitals._fields, medians, strict=True)
        if name != "seconds"
    }


SECONDS, OWN, DATA = (Vitals._fields.index(f"{name}seconds") for name in ("", "own_", "data_"))


def own_seconds(vitals: NDArray[np.float64]) -> tuple[tuple[float, ...], float]:
    """Return each rank's own seconds without the wait for data, and the seconds of the step.

    Args:
        vitals: [ranks, fields of Vitals], fp64.
    """
    seconds = np.maximum(vitals[:, OWN] - vitals[:, DATA], 0.0)
    return tuple(seconds.tolist()), float(vitals[:, SECONDS].max())
