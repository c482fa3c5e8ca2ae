"""The paper's objective, minimised as it is printed, on measured times.

Minimise over the strategy s of each component c the sum of t_comp(c) + t_comm(c, s), s being DP,
MP or HP. In print t_comp does not depend on the strategy. The other reading is that DP and HP
divide the work: the time of a component is then that of its busiest rank. Both add up components
that our simulation overlaps. The memory of a device limits nothing at these sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hvdtrain.plan.plan import Plan
from hvdtrain.planner.cost import Known
from hvdtrain.study.paper_b.plans import staged

AS_PRINTED, DIVIDED = "as printed", "with divided work"
READINGS = (AS_PRINTED, DIVIDED)
Group = tuple[int, ...]


@dataclass(frozen=True)
class Optimum:
    """The strategies that minimise the objective.

    Attributes:
        groups: the ranks of each component, by its name in model order.
        seconds: value of the objective.
    """

    groups: Mapping[str, Group]
    seconds: float

    @property
    def plan(self) -> Plan:
        """The optimum as a plan without micro-batches: nothing overlaps in the objective."""
        held = [([name], group) for name, group in self.groups.items()]
        return replace(staged(held), microbatches=1)


def minimise(known: Known, ranks: int, batch_size: int, reading: str) -> Optimum:
    """Return the exact optimum, by dynamic programming over the components.

    DP is all ranks, MP any one rank, HP one half of four or more ranks. Among equal optima the
    one on the lowest ranks is returned.
    """
    choices = groups_of(ranks)
    best: dict[Group, tuple[float, tuple[Group, ...]]] = {}
    for place in range(len(known.costs)):
        seconds = {group: _seconds(known, place, group, batch_size, reading) for group in choices}
        if not best:
            best = {group: (seconds[group], (group,)) for group in choices}
            continue
        size = known.costs[place - 1].output_bytes * batch_size
        best = {
            group: min(
                (spent + hand_over(known, before, group, size) + seconds[group], (*path, group))
                for before, (spent, path) in best.items()
            )
            for group in choices
        }
    least, path = min(best.values())
    names = [cost.name for cost in known.costs]
    return Optimum(dict(zip(names, path, strict=True)), least)


def groups_of(ranks: int) -> list[Group]:
    """Return the ranks that a component may have: single ones, halves of at least two, all."""
    everybody = tuple(range(ranks))
    halves = [everybody[: ranks // 2], everybody[ranks // 2 :]] if ranks >= 4 else []
    return [*((rank,) for rank in everybody), *halves, everybody]


def _seconds(known: Known, place: int, group: Group, batch_size: int, reading: str) -> float:
    """Return t_comp + t_comm of a component, without the transfer of its input."""
    cost, ranks = known.costs[place], known.profile.ranks
    rows = batch_size / len(group) if reading == DIVIDED else batch_size

    def computing(rank: int) -> float:
        times = ranks[rank].components[cost.name]
        return times.forward(rows) + times.backward(rows) + times.update

    if reading == DIVIDED:
        seconds = max(map(computing, group))
    else:
        seconds = min(map(computing, range(len(ranks))))  # the same under each strategy
    return seconds + known.network.reduce_seconds(group, cost.parameter_bytes)


def hand_over(known: Known, before: Group, after: Group, size: float) -> float:
    """Return the seconds of a tensor in the forward, and of its gradient in the backward.

    Args:
        before, after: ranks that hold equal numbers of its rows, in order.
        size: bytes of the whole tensor.
    """
    return _transfer(known, before, after, size) + _transfer(known, after, before, size)


def _transfer(known: Known, senders: Group, receivers: Group, size: float) -> float:
    """Return the seconds until each receiver has its rows."""
    longest = 0.0
    for receiver, wanted in zip(receivers, _parts(receivers), strict=True):
        seconds = 0.0
        for sender, held in zip(senders, _parts(senders), strict=True):
            shared = min(wanted[1], held[1]) - max(wanted[0], held[0])
            if sender != receiver and shared > 0:
                seconds += known.network.send_seconds(sender, receiver, shared * size)
        longest = max(longest, seconds)
    return longest


def _parts(group: Group) -> Sequence[tuple[float, float]]:
    """Return the first and last row of each rank, as parts of the batch."""
    return list(pairwise(place / len(group) for place in range(len(group) + 1)))
