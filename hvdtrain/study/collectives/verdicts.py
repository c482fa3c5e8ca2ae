"""Verdicts on the trade-off that paper C names, from measured ratios and their intervals."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from hvdtrain.study.collectives.cells import LIBRARIES
from hvdtrain.study.collectives.results import Group, Steps
from hvdtrain.study.collectives.textbook import (
    DIFFERENT,
    Crossing,
    counts,
    measured_crossing,
    predicted_crossing,
    size_name,
)
from hvdtrain.study.statistics import Estimate, ratio

HOLDS, FAILS, NOISE = "holds", "does not hold", "within the noise"
ONE_REPEAT = "one repeat: undecided"
SAME_COUNT = "the textbook counts the same: not applicable"
NO_PREDICTION = "the fit has no cost in which they differ: no prediction"
NEAR = 2.0  # a crossover within this factor of its prediction confirms it
# The pairs whose trade-off is judged: fewer messages first, fewer bytes second.
PAIRS = (("tree", "ring"), ("recursive-doubling", "ring"), ("recursive-doubling", "rabenseifner"))


@dataclass(frozen=True)
class Judged:
    """A verdict on a claim for one group.

    Attributes:
        measured: seconds of the algorithm that should be slower, over those of the other; None
            if the claim is not applicable.
        textbook: the same ratio by the textbook's counts.
    """

    claim: str
    group: Group
    measured: Estimate | None
    textbook: float | None
    verdict: str


@dataclass(frozen=True)
class Crossover:
    """Crossover of two algorithms of a group, predicted and measured."""

    group: Group
    pair: tuple[str, str]
    predicted: Crossing
    measured: Crossing

    @property
    def factor(self) -> float | None:
        """Return the measured size over the predicted one; None without one of them."""
        if self.predicted.size is None or self.measured.size is None:
            return None
        return self.measured.size / self.predicted.size

    @property
    def verdict(self) -> str:
        """Return whether the measurement confirms the prediction."""
        predicted, measured = self.predicted, self.measured
        if self.group.repeats < 2:
            return ONE_REPEAT
        if not predicted.below:
            works = {counts(name, self.group.ranks) for name in self.pair}
            return SAME_COUNT if len(works) == 1 else NO_PREDICTION
        if not measured.below:
            return NOISE
        if (predicted.below, predicted.above) != (measured.below, measured.above):
            return FAILS
        if self.factor is None:
            return HOLDS
        is_near = abs(math.log(self.factor)) <= math.log(NEAR)
        return HOLDS if is_near else f"{HOLDS}, but not at the predicted size"


def judge(measured: Estimate) -> str:
    """Return the verdict on a ratio that a claim says is above 1."""
    if measured.low is None or measured.high is None:
        return ONE_REPEAT
    if measured.low > 1:
        return HOLDS
    return FAILS if measured.high < 1 else NOISE


def crossovers(groups: Sequence[Group]) -> list[Crossover]:
    """Return the crossovers of all pairs that a group has."""
    return [
        Crossover(
            group,
            pair,
            predicted_crossing(*pair, group.ranks, group.network),
            measured_crossing(*pair, group.seconds),
        )
        for group in groups
        for pair in PAIRS
        if set(pair) <= group.sums.keys() and group.network is not None
    ]


def judgements(groups: Sequence[Group]) -> list[Judged]:
    """Return the verdicts on small and on large sums, and on the hierarchy, for each group."""
    return [item for group in groups for item in (*_pairs(group), *_hierarchical(group))]


def _pairs(group: Group) -> Iterator[Judged]:
    """Judge that fewer messages are faster for small sums, and fewer bytes for large ones."""
    pairs = [pair for pair in PAIRS if set(pair) <= group.sums.keys()]
    for few, many in pairs:
        size = min(group.sums[few].medians)
        claim = f"small sums: {few} is faster than {many}"
        yield _compare(claim, group, many, few, size, "messages")
    for more, less in pairs:
        size = max(group.sums[less].medians)
        claim = f"large sums: {less} is faster than {more}"
        yield _compare(claim, group, more, less, size, "volume")


def _compare(claim: str, group: Group, slower: str, faster: str, size: int, work: str) -> Judged:
    """Judge a claim at one size; `work` is the part of the counts on which it rests."""
    first, second = counts(slower, group.ranks), counts(faster, group.ranks)
    if first is None or second is None or getattr(first, work) == getattr(second, work):
        return Judged(claim, group, None, None, SAME_COUNT)
    measured = _ratio(group, slower, faster, size)
    textbook = None
    if group.network is not None:
        under = second.seconds(group.network, size)
        textbook = first.seconds(group.network, size) / under if under else None
    verdict = judge(measured)
    if getattr(first, work) < getattr(second, work):
        verdict = f"the textbook counts the contrary; {verdict}"
    return Judged(claim, group, measured, textbook, verdict)


def _hierarchical(group: Group) -> Iterator[Judged]:
    if {"hierarchical", "auto"} <= group.sums.keys():
        size = max(group.sums["auto"].medians)
        measured = _ratio(group, "auto", "hierarchical", size)
        claim = "large sums: hierarchical is faster than auto"
        verdict = "one host has one level: not applicable"
        yield Judged(claim, group, measured, None, verdict)


def _ratio(group: Group, over: str, under: str, size: int) -> Estimate:
    first, second = (list(group.sums[name].seconds[size]) for name in (over, under))
    return ratio(first, second)


def choices_of_library(groups: Sequence[Group]) -> list[str]:
    """Return a sentence per group on what the library chooses, and what another would save."""
    lines = []
    for group in groups:
        named = {name: sums for name, sums in group.sums.items() if sums.counts is not None}
        if "auto" not in group.sums or not named:
            continue
        auto = group.sums["auto"].medians
        apart = {
            name: median(abs(math.log(auto[size] / sums.medians[size])) for size in auto)
            for name, sums in named.items()
        }
        nearest = min(apart, key=lambda name: apart[name])
        best = {size: min(named, key=lambda name: named[name].medians[size]) for size in auto}
        losses = {size: auto[size] / named[best[size]].medians[size] for size in auto}
        worst = max(losses, key=lambda size: losses[size])
        loss = f"at most {losses[worst]:.2f}x slower than {best[worst]}, at {size_name(worst)}"
        if losses[worst] <= 1 + DIFFERENT:
            loss = "at no size clearly slower than another"
        lines.append(
            f"- {group.title}: auto is nearest to {nearest}, {math.exp(apart[nearest]):.2f}x "
            f"apart at the median size, and {loss}."
        )
    return lines


def growth(groups: Sequence[Group]) -> list[str]:
    """Return sentences on how latency grows with the ranks, for groups with a core per rank."""
    lines = []
    for library, name in LIBRARIES.items():
        fitting = [g for g in groups if g.engine == library and not g.is_oversubscribed]
        if len(fitting) < 2:
            if any(group.engine == library for group in groups):
                lines.append(
                    f"- {name}: how latency grows with the ranks is not decided, since fewer than "
                    "two groups have a core for each rank."
                )
            continue
        least, most = fitting[0], fitting[-1]
        for algorithm in ("ring", "tree"):
            if algorithm in least.sums and algorithm in most.sums:
                lines.append(_growth(name, algorithm, least, most))
    return lines


def _growth(library: str, algorithm: str, least: Group, most: Group) -> str:
    latencies = [group.sums[algorithm].line.fixed for group in (least, most)]
    works = [counts(algorithm, group.ranks) for group in (least, most)]
    assert works[0] is not None and works[1] is not None
    measured = f"{latencies[1] / latencies[0]:.2f}x" if latencies[0] else "from zero"
    return (
        f"- {library}, {algorithm}: latency grows {measured} from {least.ranks} to {most.ranks} "
        f"ranks; the textbook counts {works[1].messages / works[0].messages:.2f}x the messages."
    )


def step_verdicts(steps: Sequence[Steps]) -> list[str]:
    """Return a sentence per model, ranks and library: fastest algorithm and what it gains."""
    lines = []
    for key in dict.fromkeys((s.arm.model, s.arm.ranks, s.arm.engine) for s in steps):
        arms = {
            item.arm.algorithm: item
            for item in steps
            if (item.arm.model, item.arm.ranks, item.arm.engine) == key
        }
        if "auto" not in arms or len(arms) < 2:
            continue
        model, ranks, library = key
        fastest = min(arms.values(), key=lambda item: ratio(item.measured, [1.0]).value)
        title = f"- {model}, {LIBRARIES[library]}, {ranks} ranks: "
        if fastest.arm.algorithm == "auto":
            lines.append(f"{title}auto has the fastest step.")
            continue
        gain = ratio(arms["auto"].measured, fastest.measured)
        interval = ""
        if gain.low is not None and gain.high is not None:
            interval = f" ({gain.low:.3f} to {gain.high:.3f})"
        lines.append(
            f"{title}{fastest.arm.algorithm} has the fastest step; with auto a step takes "
            f"{gain.value:.3f}x{interval} its time: "
            f"{'a gain' if judge(gain) == HOLDS else judge(gain)}."
        )
    return lines
