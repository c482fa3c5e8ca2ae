"""Predicts what a plan costs: the seconds of each action, and the bytes of each rank.

`Known` and `Question` say for which model, ranks and network.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hvdtrain.plan.cut import (
    RECEIPTS,
    SENDS,
    Action,
    Cut,
    boundary,
    is_same,
    partner,
    peers,
    receipt_for,
    rows_sent,
)
from hvdtrain.plan.plan import Plan, Stage
from hvdtrain.plan.simulate import NO_REDUCTION, Costs, Reduction
from hvdtrain.plan.traffic import Operation, Sizes
from hvdtrain.planner.agreement import (
    EXACT,
    FREE,
    NONE,
    Agreement,
    Coding,
    load_bytes,
    reductions,
)
from hvdtrain.planner.network import Network
from hvdtrain.planner.profile import ComponentTimes, Profile

if TYPE_CHECKING:
    from hvdtrain.models.costs import ComponentCost

FEW = 8  # components: the seconds of more are added up as arrays


@dataclass(frozen=True)
class Known:
    """Everything a prediction needs about a model, the ranks and the network.

    Attributes:
        costs: costs of the components, in model order.
        recomputed: names of components that run their forward again in the backward.
        is_synchronised: whether replicas normalise a micro-batch together.
        agreement: how the replicas of a stage agree.
    """

    costs: "Sequence[ComponentCost]"
    profile: Profile
    network: Network
    recomputed: Collection[str] = ()
    is_synchronised: bool = False
    agreement: Agreement = EXACT

    @cached_property
    def send_seconds(self) -> Callable[[int, int, float], float]:
        """Return `Network.send_seconds` with a cache."""
        return cache(self.network.send_seconds)

    def latency_seconds(self, sender: int, receiver: int) -> float:
        """Return the seconds from the send of one byte to its arrival."""
        return self.send_seconds(sender, receiver, 1)

    def gather_seconds(self, ranks: Sequence[int]) -> float:
        """Return the seconds that a synchronised batch norm waits for its replicas.

        It is the time in one forward or one backward. A few numbers are gathered, so only
        latencies count. The result is 0 if no batch norm is synchronised.
        """
        if not self.is_synchronised or len(ranks) == 1:
            return 0.0
        latency = max(self.latency_seconds(*pair) for pair in pairwise(ranks))
        message = max(self.profile.ranks[rank].message_seconds for rank in ranks)
        return math.ceil(math.log2(len(ranks))) * (latency + message)

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Return the places of the components in the model, by name."""
        return {cost.name: number for number, cost in enumerate(self.costs)}

    @cached_property
    def is_recomputed(self) -> np.ndarray:
        """Return which components are recomputed: bool [components]."""
        return np.array([cost.name in self.recomputed for cost in self.costs])

    @cached_property
    def load_bytes(self) -> Callable[[int], Sequence[float]]:
        """Return a function from a number of replicas to `load_bytes` of each component."""
        if self.agreement == EXACT:  # the all-reduce of all that is summed, for any number
            return lambda replicas: self._summed_bytes
        return cache(
            lambda replicas: [load_bytes(self.agreement, [cost], replicas) for cost in self.costs]
        )

    @cached_property
    def _summed_bytes(self) -> Sequence[float]:
        return [load_bytes(self.agreement, [cost], 2) for cost in self.costs]

    @cached_property
    def by_name(self) -> "Mapping[str, ComponentCost]":
        """Return the costs of the components by name."""
        return {cost.name: cost for cost in self.costs}


@dataclass(frozen=True)
class Question:
    """The problem that a plan is to solve.

    Attributes:
        known: what is known about model, ranks and network.
        batch_size: images per step over all ranks together.
        schedules: schedules that the runtime supports for this model.
        microbatches: number of micro-batches, if the user has set it.
        limits: bytes that each rank may hold, if there are limits.
        keeps: if batch norm must compute the same as under another plan: that plan, and the batch
            sizes for which it must.
    """

    known: Known
    batch_size: int
    optimizer: str
    schedules: Collection[str] = ("1f1b",)
    microbatches: int | None = None
    limits: Sequence[float] | None = None
    keeps: tuple[Plan, tuple[int, ...]] | None = None

    def allows(self, plan: Plan) -> bool:
        """Return whether batch norm computes what it must under this plan."""
        if self.keeps is None:
            return True
        before, sizes = self.keeps
        normed = [cost.name for cost in self.known.costs if cost.batch_norms]
        return is_same(before, plan, sizes, normed, self.known.is_synchronised)

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.known.profile.ranks)


def plan_costs(plan: Plan, cut: Cut, known: Known) -> Costs:
    """Return the costs that a simulation of the plan needs.

    The cost of an all-reduce counts from the end of the backward during which its first buckets
    were sent: the part that the backward does not hide, plus the time by which sending slows that
    backward.
    """
    profile = known.profile
    # One rank represents all ranks with the same times.
    first = {id(profile.ranks[rank]): rank for rank in reversed(plan.ranks)}
    like = {rank: first[id(profile.ranks[rank])] for rank in plan.ranks}

    @cache
    def compute_rows(rank: int, stage: int, kind: str, rows: int) -> float:
        components = plan.stages[stage].components
        seconds = stage_seconds(known, rank, components, kind, rows) if rows else 0.0
        return seconds + gathering_seconds(known, plan.stages[stage])

    def compute(rank: int, action: Action) -> float:
        times = profile.ranks[rank]
        if action.kind == "STEP":
            components = plan.stages[action.stage].components
            return sum(times.components[name].update for name in components)
        assert action.microbatch is not None
        rows = cut.rows(action.stage, rank, action.microbatch)
        if action.kind == "LOAD":
            return times.load(rows) if rows and action.stage == 0 else 0.0
        return compute_rows(like[rank], action.stage, action.kind, rows)

    def hand_over(sender: int, receiver: int, action: Action) -> float:
        return known.latency_seconds(sender, receiver)

    def communicate(rank: int, action: Action) -> float:
        if action.kind in (*SENDS, *RECEIPTS):
            return 0.5 * profile.ranks[rank].message_seconds * len(peers(cut, rank, action))
        receipt = receipt_for(action, plan.last)
        return receive_seconds(plan, cut, known, rank, receipt) if receipt else 0.0

    def reduce(stage: int) -> Reduction:
        return reduction_of(plan, cut, stage, known)

    return Costs(compute, hand_over, cache(reduce), communicate)


def receive_seconds(plan: Plan, cut: Cut, known: Known, rank: int, receipt: Action) -> float:
    """Return the seconds that a rank needs to receive the data of a RECV once it has been sent.

    A message moves only while its receiver waits for it: MPI makes no progress during computing,
    and copies within a host use the receiver's own processor.
    """
    send = partner(receipt)
    last = plan.stages[boundary(send.stage, send.kind)].components[-1]
    row_bytes = known.by_name[last].output_bytes
    return sum(
        known.send_seconds(sender, rank, row_bytes * rows_sent(cut, sender, rank, send))
        - known.latency_seconds(sender, rank)
        for sender in peers(cut, rank, receipt)
    )


def gathering_seconds(known: Known, stage: Stage) -> float:
    """Return the seconds of a stage's synchronised batch norms in one forward or backward."""
    layers = sum(known.by_name[name].batch_norms for name in stage.components)
    return layers * known.gather_seconds(stage.ranks)


def stage_seconds(
    known: Known, rank: int, components: Sequence[str], kind: str, rows: int
) -> float:
    """Return the seconds of an action of `kind` (F, B, I or W) on some components and samples."""
    if kind in "FB" and len(components) > FEW:
        seconds = _whole_seconds(known, rank, kind, rows)
        return float(seconds[[known.place[name] for name in components]].sum())
    times = known.profile.ranks[rank].components
    return sum(_seconds(times[name], kind, rows, name in known.recomputed) for name in components)


def _whole_seconds(known: Known, rank: int, kind: str, rows: int) -> np.ndarray:
    """Return the seconds of F or B of every component: fp64 [components]."""
    times = known.profile.ranks[rank].arrays
    if kind == "F":
        return times.forward(rows)
    seconds: np.ndarray = times.backward(rows) + known.is_recomputed * times.forward(rows)
    return seconds


def _seconds(times: ComponentTimes, kind: str, rows: int, is_recomputed: bool) -> float:
    if kind == "F":
        return times.forward(rows)
    again = times.forward(rows) if is_recomputed else 0.0
    if kind == "B":
        return times.backward(rows) + again
    half = times.input_half if kind == "I" else times.weight_half
    # Without a measurement each half counts as half: both have the same number of operations.
    seconds = half(rows) if half is not None else 0.5 * times.backward(rows)
    return seconds + (again if kind == "I" else 0.0)


class Part(NamedTuple):
    """A part of a backward: its seconds alone, and its slowdown beside an all-reduce."""

    seconds: float
    slowdown: float


class Sum(NamedTuple):
    """An all-reduce: the number of parts after which it can start, and its seconds alone."""

    after: int
    seconds: float


def reduction_of(plan: Plan, cut: Cut, stage: int, known: Known) -> Reduction:
    """Return the seconds of agreeing on a stage's gradients, and those after its last backward.

    Buckets are reduced one after another; the first ones while the backward computes, which slows
    both. If the backward is split, the buckets wait for its end. Nothing hides the operations and
    the decompression that follow a bucket's first operations, nor a meeting of replicas that train
    apart; a step gets its share of a meeting.
    """
    ranks, components = plan.stages[stage].ranks, plan.stages[stage].components
    if len(ranks) == 1:
        return NO_REDUCTION
    costs = [known.by_name[name] for name in components]
    agreement, replicas = known.agreement, len(ranks)
    if agreement.period is not None:
        meeting = agreement.meeting(Sizes.total(cost.sizes for cost in costs), replicas)
        return Reduction(*2 * (_seconds_of(meeting, ranks, known) / agreement.period,))
    sums = reductions(agreement, costs, replicas)
    coding = [_coding(one.bytes_of, components[::-1], ranks, known) for one in sums]
    first = [_seconds_of(one.traffic.first, ranks, known) for one in sums]
    encoding = sum(code.encode for code in coding)
    after = sum(_seconds_of(one.traffic.second, ranks, known) for one in sums)
    after += sum(code.decode for code in coding)
    whole = encoding + sum(first) + after
    if plan.splits_backward:
        return Reduction(whole, whole)
    parts = _backward_parts(plan, cut, stage, known, components[::-1])
    compute, reduce = known.network.contention
    starts = []
    for number, (one, code) in enumerate(zip(sums, coding, strict=True)):
        place = one.last + 1 + number  # behind its last component, and what was compressed before
        parts.insert(place, Part(code.encode, compute))
        starts.append(place + 1)
    exposed = exposed_seconds(parts, list(map(Sum, starts, first)), reduce)
    return Reduction(whole, encoding + exposed + after)


def _seconds_of(operations: Iterable[Operation], ranks: Sequence[int], known: Known) -> float:
    """Return the seconds of operations, one after another.

    Each takes as long as an all-reduce that sends as many bytes.
    """
    return sum(
        known.network.reduce_seconds(ranks, one.as_all_reduce(len(ranks))) for one in operations
    )


def _coding(
    bytes_of: Mapping[int, float], backwards: Sequence[str], ranks: Sequence[int], known: Known
) -> Coding:
    """Return the seconds of compressing and decompressing a bucket, on the slowest rank.

    Args:
        bytes_of: bytes of gradients by component, counted from the end of the stage; a part of a
            component's gradients takes that part of its seconds.
    """
    if known.agreement.compress == NONE:
        return FREE
    seconds = []
    distinct = {id(times): times for times in (known.profile.ranks[rank] for rank in ranks)}
    for rank_times in distinct.values():
        times, encode, decode = rank_times.components, 0.0, 0.0
        for place, size in bytes_of.items():
            name = backwards[place]
            code = known.agreement.coding(times[name].coding)
            sizes = known.by_name[name].sizes
            part = size / max(1, sizes.itemsize * sizes.elements)
            encode, decode = encode + part * code.encode, decode + part * code.decode
        seconds.append(Coding(encode, decode))
    return Coding(*map(max, zip(*seconds, strict=True)))


def _backward_parts(
    plan: Plan, cut: Cut, stage: int, known: Known, backwards: Sequence[str]
) -> list[Part]:
    """Return the last backward of a stage, component by component, on its slowest replica."""
    last, ranks = cut.microbatches - 1, plan.stages[stage].ranks
    places = [known.place[name] for name in backwards]
    gathering = known.gather_seconds(ranks) * np.array(
        [known.costs[place].batch_norms for place in places], float
    )
    ready, slowdowns = np.zeros(len(places)), np.ones(len(places))
    for rank in ranks:
        rows = cut.rows(stage, rank, last)
        seconds = _whole_seconds(known, rank, "B", rows)[places] if rows else 0.0
        ready = np.maximum(ready, np.cumsum(seconds + gathering))
        measured = known.profile.ranks[rank].arrays.contention[places]
        slowdown = np.where(np.isnan(measured), known.network.contention.compute, measured)
        slowdowns = np.maximum(slowdowns, slowdown)
    seconds = np.diff(ready, prepend=0.0)
    return [Part(*pair) for pair in zip(seconds.tolist(), slowdowns.tolist(), strict=True)]


def exposed_seconds(parts: Sequence[Part], sums: Sequence[Sum], slowdown: float) -> float:
    """Return the seconds that all-reduces add to a backward.

    One all-reduce runs at a time. Galvatron (Miao et al., VLDB 2023) reports that predictions are
    off by 15 % without the slowdowns; there they are the same for all parts.

    Args:
        parts: in the order in which they run.
        sums: in the order in which they start.
        slowdown: of an all-reduce beside a part.
    """
    waiting = deque(sums)
    now = in_flight = 0.0  # seconds since the start; seconds alone that the all-reduce still takes
    for done, part in enumerate(parts):
        left = part.seconds
        while left > 0:
            while not in_flight and waiting and waiting[0].after <= done:
                in_flight = waiting.popleft().seconds
            if not in_flight:
                now, left = now + left, 0.0
            elif left * part.slowdown <= in_flight * slowdown:
                now += left * part.slowdown
                in_flight -= left * part.slowdown / slowdown
                left = 0.0
            else:
                now += in_flight * slowdown
                left -= in_flight * slowdown / part.slowdown
                in_flight = 0.0
    now += in_flight + sum(one.seconds for one in waiting)
    return now - sum(part.seconds for part in parts)
