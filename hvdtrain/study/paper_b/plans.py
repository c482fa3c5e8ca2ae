"""The shapes of paper B's strategies on a number of ranks, which the paper leaves open.

The paper names strategies by component: DP on all devices, MP partitioned over devices, HP on
some. A plan puts whole components on ranks, so MP means one rank here.
"""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from hvdtrain.models.costs import ComponentCost
from hvdtrain.plan.plan import Plan, Stage, pipeline

HEAVY = 0.5  # part of all parameters that the tail on one rank holds at least


def hybrid(costs: Sequence[ComponentCost], ranks: int) -> Plan:
    """Return the hybrid plan: two stages of several ranks each, or on few ranks a heavy tail.

    With four ranks or more and an even number, each of two stages has half of the ranks. On fewer,
    the paper's text is followed, which gives "parameter-heavy layers" to MP: the shortest tail
    with half of the parameters is on the last rank, and all else on all ranks.
    """
    names = [cost.name for cost in costs]
    if ranks >= 4 and ranks % 2 == 0 and len(names) > 1:
        work = [cost.forward_flops for cost in costs]
        return pipeline(names, work, ranks, 2, ranks // 2, None, "1f1b", f"hp:2x{ranks // 2}")
    heavy, held = len(costs), 0
    total = sum(cost.parameters for cost in costs)
    while heavy > 1 and held < HEAVY * total:
        heavy -= 1
        held += costs[heavy].parameters
    return staged([(names[:heavy], tuple(range(ranks))), (names[heavy:], (ranks - 1,))])


def figure_6(names: Sequence[str], ranks: int) -> Plan | None:
    """Return the plan with figure 6's labels: attention MP, MLP DP, embedding HP.

    The ranks take turns with the attentions. HP is half of the ranks, or both of two. The head,
    which figure 6 does not show, is DP. None if the model has no attention components.
    """
    if not any(name.endswith(".attention") for name in names):
        return None
    everybody = tuple(range(ranks))
    some = everybody if ranks < 4 else everybody[: ranks // 2]
    held: list[tuple[list[str], tuple[int, ...]]] = []
    attentions = 0
    for name in names:
        if name.endswith(".attention"):
            group: tuple[int, ...] = (attentions % ranks,)
            attentions += 1
        else:
            group = some if name == names[0] else everybody
        held.append(([name], group))
    return staged(held)


def staged(held: Sequence[tuple[Sequence[str], tuple[int, ...]]]) -> Plan:
    """Return the plan whose neighbouring components on the same ranks form a stage."""
    stages = [
        Stage(tuple(name for names, _ in group for name in names), ranks, (1,) * len(ranks))
        for ranks, group in groupby(held, key=itemgetter(1))
    ]
    return Plan(tuple(stages), microbatches=2)
