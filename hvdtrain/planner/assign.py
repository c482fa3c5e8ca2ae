"""Gives each component of a model its ranks: all (DP), some (HP) or one (MP), in any mix.

Baligodugula and Amsaad (arXiv 2503.23186, III.B) give each component a strategy. Neighbouring
components on the same ranks are a stage. The estimate for a step of m micro-batches is

    sum of p + max over ranks r of (l_r + q_r).

p are the seconds that a component, or the transfer to the ranks of the next one, adds to the way
of a micro-batch through all stages and back. l_r are those that rank r spends on the other m - 1
micro-batches and on updates, and q_r those of its all-reduces that no backward of an earlier stage
hides: a rank sums one stage at a time, each once its backward is over.

The estimate is minimised by dynamic programming, from the last component to the first, over sets
of partial assignments. One is dropped if another with the same ranks in front is at least as good
in everything, and at last the least promising ones are, if there are more than a given number. A
bound says how promising: for weights of the ranks that sum to 1, the maximum is at least the
weighted sum, whose least value is the length of a shortest path (Lagrangian relaxation).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.plan.plan import Plan
from hvdtrain.planner.cost import Known, Question
from hvdtrain.planner.divide import places_of, plan_of, shares_of, unit_of
from hvdtrain.planner.memory import activation_bytes, lasting_bytes

Ranks = tuple[int, ...]
MOST_FREE = 4  # ranks: any set of them may be a group
MOST_RUNS = 8  # ranks: any run of neighbours may be a group
WIDTH, NARROW = 64, 16  # partial assignments that are kept, of small and of large problems
MANY = 1000  # components times groups
UNFIT = math.inf
STEP, PAPER, PAPER_DIVIDED = "step", "paper", "paper-divided"  # what a plan minimises
SCHEDULE = "1f1b"  # the only one that fills ranks which are in several stages


@dataclass(frozen=True)
class Prices:
    """The costs of each component on each group of ranks, and of each change of groups.

    Attributes:
        member: whether a rank is in a group: bool [groups, ranks].
        alike: equal for ranks that may change places: int [ranks].
        microbatches: m.
        passing: p of a component on a group: fp64 [components, groups].
        backward: the part of it that may hide all-reduces: fp64 [components, groups].
        update: seconds of an update on a group: fp64 [components, groups].
        reduction: seconds of an all-reduce over a group: fp64 [components, groups].
        latency: seconds of an all-reduce whatever its components: fp64 [groups].
        sizes: bytes of a sample behind a component: fp64 [components - 1]; UNFIT if the ranks may
            not change there.
        change: p of a change: fp64 [2, groups before, groups behind]: fixed, and per byte.
        received: of these, seconds of each rank: fp64 [2, groups before, groups behind, ranks].
        lasting: bytes that a component holds on each rank of a group: fp64 [components, groups].
        flight: bytes that it holds for one micro-batch in flight: fp64 [components, groups].
        limits: bytes that each rank may hold: fp64 [ranks]; None: any.
    """

    member: np.ndarray
    alike: np.ndarray
    microbatches: int
    passing: np.ndarray
    backward: np.ndarray
    update: np.ndarray
    reduction: np.ndarray
    latency: np.ndarray
    sizes: np.ndarray
    change: np.ndarray
    received: np.ndarray
    lasting: np.ndarray
    flight: np.ndarray
    limits: np.ndarray | None = None


class Assignment(NamedTuple):
    """The group of each component by number, and the estimated seconds per step."""

    groups: tuple[int, ...]
    seconds: float


class _Partial(NamedTuple):
    """Assignments of the components from one to the last, by number.

    Attributes:
        passing: sums of p: fp64 [number].
        load: l: fp64 [number, ranks].
        queue: seconds until the all-reduces of closed stages are over: fp64 [number, ranks].
        pending: seconds of the all-reduce of the open stage: fp64 [number].
        held: bytes that ranks hold: fp64 [number, ranks].
        stages: stages so far: int [number].
        used: the ranks that hold something, as bits: int [number].
        group: of the first component: int [number].
        behind: the number of the assignment of the components behind the first one.
    """

    passing: np.ndarray
    load: np.ndarray
    queue: np.ndarray
    pending: np.ndarray
    held: np.ndarray
    stages: np.ndarray
    used: np.ndarray
    group: np.ndarray
    behind: np.ndarray

    def take(self, which: np.ndarray) -> "_Partial":
        """Return some of the assignments."""
        return _Partial(*(values[which] for values in self))


def groups_of(ranks: int) -> list[Ranks]:
    """Return the groups of ranks that a component may have, the largest last.

    Of few ranks these are all sets, of some all runs of neighbours, of many the equal parts.
    """
    everybody = range(ranks)
    if ranks <= MOST_FREE:
        return [one for n in everybody for one in combinations(everybody, n + 1)]
    is_free = ranks <= MOST_RUNS
    return [
        tuple(range(first, first + size))
        for size in range(1, ranks + 1)
        if is_free or ranks % size == 0
        for first in range(0, ranks - size + 1, 1 if is_free else size)
    ]


def assign(
    prices: Prices,
    width: int,
    most: int = 1,
    all_ranks: bool = True,
    below: float = math.inf,
) -> list[Assignment]:
    """Return the assignments with the smallest estimates, the best first.

    Args:
        width: partial assignments that are kept per component.
        most: assignments to return.
        all_ranks: whether each rank must have a component, as in a plan.
        below: of interest are only estimates below this value.
    """
    components, ranks = len(prices.passing), prices.member.shape[1]
    weights = np.vstack([np.full(ranks, 1 / ranks), np.eye(ranks)])
    exposed, hidden = (_before(prices, weights, backward) for backward in (0.0, 1.0))
    bits = (prices.member @ (1 << np.arange(ranks))).astype(np.int64)
    tables: list[_Partial] = []
    for component in reversed(range(components)):
        grown = _grown(prices, component, tables[-1] if tables else None, bits)
        member = prices.member[grown.group]
        queued = np.where(member, grown.queue.max(axis=1, where=member, initial=0.0)[:, None], 0.0)
        queued = np.maximum(grown.queue, queued + member * grown.pending[:, None])
        bounds = (
            grown.load @ weights.T + exposed[component, grown.group],
            (grown.load + queued) @ weights.T + hidden[component, grown.group],
        )
        bound = grown.passing + np.maximum(*(one.max(axis=1) for one in bounds))
        fits: Any = np.ones(len(bound), bool)
        if prices.limits is not None:
            fits = (grown.held <= prices.limits).all(axis=1)
        if component == 0:
            bound = grown.passing + (grown.load + queued).max(axis=1)
            fits = fits & ((grown.used == (1 << ranks) - 1) | (not all_ranks))
        order = np.argsort(bound, kind="stable")
        order = order[fits[order] & (bound[order] < below)][: 2 * width]
        if not len(order):
            return []
        grown = grown.take(order)
        if component:
            grown = grown.take(np.flatnonzero(_is_undominated(grown, prices))[:width])
        tables.append(grown)
    best: list[Assignment] = []
    for place, seconds in enumerate(bound[order][:most].tolist()):
        path = []
        for table in reversed(tables):
            path.append(int(table.group[place]))
            place = int(table.behind[place])
        best.append(Assignment(tuple(path), seconds))
    return best


def _grown(prices: Prices, component: int, old: _Partial | None, bits: np.ndarray) -> _Partial:
    """Return the assignments whose first component is on any group."""
    ranks, again = prices.member.shape[1], prices.microbatches - 1
    if old is None:
        none, zero = np.zeros((1, ranks)), np.zeros(1, np.int64)
        start = _Partial(0.0 * zero, none, none, 0.0 * zero, none, zero, zero, zero - 1, zero)
        group = np.flatnonzero(_is_last_of_its_kind(prices, start)[0])
        grown = start.take(np.zeros_like(group))._replace(
            pending=prices.latency[group],
            stages=np.ones_like(group),
            used=bits[group],
            group=group,
        )
    else:
        number = len(old.group)
        is_new = _is_last_of_its_kind(prices, old)
        is_new &= math.isfinite(prices.sizes[component])
        is_new[np.arange(number), old.group] = True
        behind, group = np.nonzero(is_new)
        grown = old.take(behind)._replace(group=group, behind=behind)
        changed = np.flatnonzero(group != old.group[behind])
        before, after = group[changed], old.group[behind[changed]]
        size = prices.sizes[component]
        if len(changed):
            passing, load, queue = grown.passing.copy(), grown.load.copy(), grown.queue.copy()
            pending, stages = grown.pending.copy(), grown.stages.copy()
            passing[changed] += (
                prices.change[0, before, after] + size * prices.change[1, before, after]
            )
            if again:
                received = (
                    prices.received[0, before, after] + size * prices.received[1, before, after]
                )
                load[changed] += again * received
            member = prices.member[after]
            start = queue[changed].max(axis=1, where=member, initial=0.0)
            end = (start + pending[changed])[:, None]
            is_summed = member & (pending[changed] > 0)[:, None]
            queue[changed] = np.where(is_summed, end, queue[changed])
            pending[changed] = prices.latency[before]
            stages[changed] += 1
            used = grown.used | bits[group]
            grown = grown._replace(
                passing=passing, load=load, queue=queue, pending=pending, stages=stages, used=used
            )
    place, member = (component, grown.group), prices.member[grown.group]
    load = again * prices.passing[place] + prices.update[place]
    held = prices.lasting[place] + prices.flight[place] * np.minimum(
        grown.stages, prices.microbatches
    )
    return grown._replace(
        passing=grown.passing + prices.passing[place],
        load=grown.load + member * load[:, None],
        queue=np.maximum(0.0, grown.queue - prices.backward[place][:, None]),
        pending=grown.pending + prices.reduction[place],
        held=grown.held + member * held[:, None],
    )


def _is_last_of_its_kind(prices: Prices, old: _Partial) -> np.ndarray:
    """Return which groups no later one replaces, its ranks being alike: bool [number, groups]."""
    state = np.stack(
        [
            *(old.load, old.queue, 1e-9 * old.held, prices.member[old.group]),
            *((old.used[:, None] >> np.arange(len(prices.alike))) & 1,),
            np.broadcast_to(prices.alike, old.load.shape),
        ]
    )
    key = np.tensordot(np.array([1.7, 2.3, 3.1, 5.3, 7.9, 11.3]), state, 1)
    kind = np.sin(1e3 * key) @ prices.member.T + 10.0 * prices.member.sum(axis=1)
    same = np.isclose(kind[:, :, None], kind[:, None, :], rtol=0, atol=1e-7)
    last: np.ndarray = ~(same & np.tri(len(prices.member), k=-1, dtype=bool).T).any(axis=2)
    return last


def _is_undominated(partial: _Partial, prices: Prices) -> np.ndarray:
    """Return which assignments no other one is as good as in everything: bool [number]."""
    number = len(partial.group)
    values = [partial.passing, partial.pending, *partial.queue.T, *partial.load.T]
    if prices.limits is not None:  # of more stages, those in front hold more micro-batches
        values += [partial.stages, *partial.held.T]
    better = partial.group[:, None] == partial.group
    better &= (partial.used[:, None] | partial.used) == partial.used[:, None]
    strictly = np.zeros((number, number), bool)
    for value in values:
        better &= value[:, None] <= value
        strictly |= value[:, None] < value
    before = np.tri(number, k=-1, dtype=bool).T  # of equal ones the first stays
    undominated: np.ndarray = ~(better & (strictly | before)).any(axis=0)
    return undominated


def _before(prices: Prices, weights: np.ndarray, hides: float) -> np.ndarray:
    """Return the least that the components before each one add.

    Args:
        weights: of the ranks: fp64 [weights, ranks].
        hides: part of the backwards that all-reduces behind may hide.

    Returns:
        fp64 [components, groups, weights].
    """
    components, groups = prices.passing.shape
    weight, again = prices.member.astype(float) @ weights.T, prices.microbatches - 1
    change, per_byte = (
        passing[:, :, None] + again * (received @ weights.T)
        for passing, received in zip(prices.change, prices.received, strict=True)
    )
    best = np.zeros((components, groups, len(weights)))
    for component in range(components - 1):
        passing = prices.passing[component]
        load = again * passing + prices.update[component]
        on_same = best[component] + (passing - hides * prices.backward[component])[:, None]
        on_same += weight * load[:, None]
        best[component + 1] = on_same
        size = prices.sizes[component]
        if math.isfinite(size):
            changed = (on_same[:, None] + change + size * per_byte).min(axis=0)
            best[component + 1] = np.minimum(on_same, changed)
    return best


def prices_of(
    question: Question, microbatches: int, groups: Sequence[Ranks], unit: int = 1
) -> Prices:
    """Return the prices of a question's components on groups of its ranks.

    Args:
        unit: neighbouring ranks that are in the same groups; they count as one.
    """
    known, ranks = question.known, question.ranks
    profile, costs, network = known.profile.ranks, known.costs, known.network
    samples = -(-question.batch_size // microbatches)
    shape = len(costs), len(groups)
    passing, backward, update, reduction = (np.zeros(shape) for _ in range(4))
    latency, rows = np.zeros(len(groups)), []
    norms = np.array([cost.batch_norms for cost in costs], float)
    largest = sum(known.load_bytes(ranks)) or 1.0
    period = known.agreement.period or 1

    @cache
    def computing(rank: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        times = profile[rank].arrays
        forward, back = times.forward(number), times.backward(number)
        return forward, back + known.is_recomputed * forward

    like = {id(times): rank for rank, times in reversed(list(enumerate(profile)))}
    for place, group in enumerate(groups):
        shares = shares_of(question, group, samples)
        rows.append([-(-samples * share // sum(shares)) for share in shares])
        alike = {(like[id(profile[rank])], n) for rank, n in zip(group, rows[-1], strict=True)}
        gathering = known.gather_seconds(group) * norms
        back = np.max([computing(*one)[1] for one in alike], axis=0) + gathering
        forward = np.max([computing(*one)[0] for one in alike], axis=0) + gathering
        passing[:, place], backward[:, place] = forward + back, back
        update[:, place] = np.max([profile[rank].arrays.update for rank, _ in alike], axis=0)
        count = len(group)
        if count > 1:
            latency[place] = network.reduce_seconds(group, 1.0) / period
            whole = network.reduce_seconds(group, largest) / period
            per_byte = max(0.0, whole - latency[place]) / largest
            reduction[:, place] = per_byte * np.array(known.load_bytes(count))
    ends = [cost.output_bytes if cost.is_differentiable else UNFIT for cost in costs[:-1]]
    hosts = network.hosts if len(set(network.hosts)) not in (1, ranks) else [""] * ranks
    if network.has_unlike_links:
        hosts = [str(rank) for rank in range(ranks)]  # no rank is like another one
    kinds = [
        [(like[id(profile[rank])], hosts[rank]) for rank in range(first, first + unit)]
        for first in range(0, ranks, unit)
    ]
    member = np.array([[rank in group for rank in range(0, ranks, unit)] for group in groups])
    change, received = _changes(known, member, rows, samples, unit)
    return Prices(
        member=member,
        alike=np.array([kinds.index(kind) for kind in kinds]),
        microbatches=microbatches,
        passing=passing,
        backward=backward,
        update=update,
        reduction=reduction,
        latency=latency,
        sizes=np.array(ends, float),
        change=change,
        received=received,
        **_memory(question, groups, [max(counts) for counts in rows], unit),
    )


def _memory(
    question: Question, groups: Sequence[Ranks], most: Sequence[int], unit: int
) -> dict[str, Any]:
    """Return `lasting`, `flight` and `limits` of `Prices`; zeros and None without limits.

    Args:
        most: samples of a micro-batch on the rank that has the most, by group.
    """
    known, profile = question.known, question.known.profile.ranks
    lasting, flight = np.zeros((2, len(known.costs), len(groups)))
    if question.limits is None:
        return {"lasting": lasting, "flight": flight}

    @cache
    def lasting_on(count: int) -> list[int]:
        return [lasting_bytes([cost], question.optimizer, count) for cost in known.costs]

    @cache
    def flight_of(rows: int) -> list[int]:
        return [activation_bytes([cost], rows, known.recomputed) for cost in known.costs]

    for place, (group, rows) in enumerate(zip(groups, most, strict=True)):
        factor = max(profile[rank].activation_factor for rank in group)
        lasting[:, place] = lasting_on(len(group))
        flight[:, place] = factor * np.array(flight_of(rows))
    left = np.subtract(question.limits, [rank.resident_bytes for rank in profile])
    return {"lasting": lasting, "flight": flight, "limits": left.reshape(-1, unit).min(axis=1)}


def paper_prices(
    question: Question, groups: Sequence[Ranks], divides: bool, unit: int = 1
) -> Prices:
    """Return prices whose sum is paper B's objective: t_comp + t_comm of each component.

    Baligodugula and Amsaad (arXiv 2503.23186) add up what a step overlaps, and pass whole batches.

    Args:
        divides: whether ranks divide the work of a component, whose time is then that of its
            slowest rank. As printed, t_comp does not depend on the strategy: it is that of the
            fastest rank for the whole batch.
    """
    prices, known = prices_of(question, 1, groups, unit), question.known
    computing = prices.passing + prices.update
    if not divides:
        times = {id(rank): rank.arrays for rank in known.profile.ranks}.values()
        rows = question.batch_size
        alone = [one.forward(rows) + one.backward(rows) + one.update for one in times]
        computing = np.repeat(np.min(alone, axis=0)[:, None], len(groups), axis=1)
    none: dict[str, Any] = dict.fromkeys(
        ("backward", "update", "reduction"), np.zeros_like(computing)
    )
    reduction = np.array(
        [
            [known.network.reduce_seconds(group, cost.parameter_bytes) for group in groups]
            for cost in known.costs
        ]
    )
    latency = np.zeros(len(groups))
    return replace(prices, passing=computing + reduction, latency=latency, **none)


def paper_seconds(question: Question, plan: Plan) -> float:
    """Return paper B's objective of a plan, with divided work: what `paper_prices` add up to."""
    groups = list(dict.fromkeys(stage.ranks for stage in plan.stages))
    # Ranks between the ends of all groups are in the same groups.
    ends = {
        end
        for group in map(set, groups)
        for rank in group
        for end in (rank, rank + 1)
        if (end in group) != (end - 1 in group)
    }
    prices = paper_prices(question, groups, divides=True, unit=math.gcd(question.ranks, *ends))
    path = [groups.index(stage.ranks) for stage in plan.stages for _ in stage.components]
    seconds = float(prices.passing[np.arange(len(path)), path].sum())
    for size, (before, behind) in zip(prices.sizes, pairwise(path), strict=True):
        if before != behind:
            seconds += float(prices.change[0, before, behind])
            seconds += float(size * prices.change[1, before, behind])
    return seconds


def _changes(
    known: Known, member: np.ndarray, rows: Sequence[Sequence[int]], samples: int, unit: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return `Prices.change` and `Prices.received`.

    Args:
        rows: samples of a micro-batch, by group and rank.
    """
    size = samples * max(cost.output_bytes for cost in known.costs) or 1
    firsts = range(0, len(known.profile.ranks), unit)
    latency = np.array([[known.latency_seconds(one, to) for to in firsts] for one in firsts])
    whole = np.array([[known.send_seconds(one, to, size) for to in firsts] for one in firsts])
    per_byte = np.maximum(0.0, whole - latency) / (size * unit)
    message = np.array([known.profile.ranks[rank].message_seconds for rank in firsts])
    held = np.zeros(member.shape)
    for group, counts in enumerate(rows):
        share = np.array(counts).reshape(-1, unit).sum(axis=1) / sum(counts)
        held[group, member[group]] = samples * share
    stop = held.cumsum(axis=1)
    start = stop - held
    # [before, behind, rank of before, rank of behind]: rows that go from one to the other.
    shared = np.minimum(stop[:, None, :, None], stop[None, :, None]) - np.maximum(
        start[:, None, :, None], start[None, :, None]
    )
    shared = np.maximum(0.0, shared) * (1 - np.eye(len(firsts)))
    is_sent = shared > 1e-9
    forward = [(is_sent * message).sum(axis=2), (shared * per_byte).sum(axis=2)]
    back = [
        (is_sent * message[:, None]).sum(axis=3),
        (shared * per_byte.T).sum(axis=3),
    ]
    received = np.add(forward, back)
    change = np.max(forward, axis=-1) + np.max(back, axis=-1)
    change[0] += 2 * (is_sent * latency).max(axis=(2, 3))
    return change, received


def assigned_plans(
    question: Question,
    microbatches: int,
    most: int,
    objective: str = STEP,
    below: float = math.inf,
) -> Iterator[Plan]:
    """Yield the plans with the best estimates in which any component may have any ranks.

    Args:
        microbatches: their number, which the paper's objectives do not have.
        most: plans.
        objective: STEP, PAPER or PAPER_DIVIDED.
        below: of interest are only estimates below this value.
    """
    ranks, places = question.ranks, places_of(question)
    unit = unit_of(ranks)
    groups = [
        tuple(rank for one in group for rank in range(unit * one, unit * (one + 1)))
        for group in groups_of(ranks // unit)
    ]
    width = WIDTH if len(places) * len(groups) < MANY else NARROW
    if objective == STEP:
        prices = prices_of(question, microbatches, groups, unit)
    else:
        prices = paper_prices(question, groups, objective == PAPER_DIVIDED, unit)
    for one in assign(_joined(prices, places), width, most, below=below):
        runs = []
        for group, run in groupby(range(len(one.groups)), key=one.groups.__getitem__):
            first, *_, last = 2 * list(run)
            runs.append((places[first], places[last + 1], groups[group]))
        yield plan_of(question, runs, microbatches, SCHEDULE)


def _joined(prices: Prices, places: Sequence[int]) -> Prices:
    """Return the prices of runs of components that stay together."""
    names = ("passing", "backward", "update", "reduction", "lasting", "flight")
    sums: dict[str, Any] = {
        name: np.add.reduceat(getattr(prices, name), places[:-1], axis=0) for name in names
    }
    return replace(prices, **sums, sizes=prices.sizes[np.array(places[1:-1], int) - 1])
