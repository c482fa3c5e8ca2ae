"""The strategies that are compared, as plans, and the optimum of the paper's printed objective.

The paper names strategies by component: DP on all devices, MP partitioned over devices, HP on
some. A plan puts whole components on ranks, so MP means one rank here.

Its objective: minimise over the strategy s of each component c the sum of t_comp(c) +
t_comm(c, s), s being DP, MP or HP. In print t_comp does not depend on the strategy. The other
reading is that DP and HP divide the work: the time of a component is then that of its busiest
rank. Both add up components that our simulation overlaps. The memory of a device limits nothing
at these sizes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

from hvdtrain.errors import DataError
from hvdtrain.host import files
from hvdtrain.models.costs import ComponentCost
from hvdtrain.plan.plan import Plan, Stage, pipeline
from hvdtrain.planner.cost import Known
from hvdtrain.study.runs import make_folder

TABLE_I = ("single", "DP", "MP", "hybrid", "adaptive")
SINGLE, DP, MP, HYBRID, ADAPTIVE = TABLE_I
FIGURE_6, OBJECTIVE = "figure 6", "objective"
HEAVY = 0.5  # part of all parameters that the tail on one rank holds at least
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

    def same_as(self, ranks: int) -> str | None:
        """Return the strategy that the optimum is the same as; OBJECTIVE for a plan of its own.

        None if it leaves ranks idle, which a plan may not.
        """
        groups = set(self.groups.values())
        if groups == {tuple(range(ranks))}:
            return DP
        if len(groups) == 1 and len(*groups) == 1:
            return SINGLE
        used = {rank for group in groups for rank in group}
        return OBJECTIVE if len(used) == ranks else None


def minimise(known: Known, ranks: int, batch_size: int, reading: str) -> Optimum:
    """Return the exact optimum, by dynamic programming over the components.

    DP is all ranks, MP any one rank, HP one half of four or more ranks. Among equal optima the
    one on the lowest ranks is returned.
    """

    def spent_on(cost: ComponentCost, group: Group) -> float:
        """Return t_comp + t_comm of a component, without the transfer of its input."""
        rows = batch_size / len(group) if reading == DIVIDED else batch_size
        times = [rank.components[cost.name] for rank in known.profile.ranks]
        computing = [one.forward(rows) + one.backward(rows) + one.update for one in times]
        # As printed the time is the same under each strategy: that of the fastest rank.
        divided = max(computing[rank] for rank in group)
        seconds = divided if reading == DIVIDED else min(computing)
        return seconds + known.network.reduce_seconds(group, cost.parameter_bytes)

    choices = groups_of(ranks)
    first = known.costs[0]
    best: dict[Group, tuple[float, tuple[Group, ...]]] = {
        group: (spent_on(first, group), (group,)) for group in choices
    }
    for previous, cost in pairwise(known.costs):
        size = previous.output_bytes * batch_size
        best = {
            group: min(
                (
                    spent + hand_over(known, before, group, size) + spent_on(cost, group),
                    (*path, group),
                )
                for before, (spent, path) in best.items()
            )
            for group in choices
        }
    least, path = min(best.values())
    return Optimum(dict(zip([cost.name for cost in known.costs], path, strict=True)), least)


def groups_of(ranks: int) -> list[Group]:
    """Return the ranks that a component may have: single ones, halves of at least two, all."""
    everybody = tuple(range(ranks))
    halves = [everybody[: ranks // 2], everybody[ranks // 2 :]] if ranks >= 4 else []
    return [*((rank,) for rank in everybody), *halves, everybody]


def hand_over(known: Known, before: Group, after: Group, size: float) -> float:
    """Return the seconds of a tensor in the forward, and of its gradient in the backward.

    Args:
        before, after: ranks that hold equal numbers of its rows, in order.
        size: bytes of the whole tensor.
    """

    def seconds_of(senders: Group, receivers: Group) -> float:
        """Return the seconds until each receiver has its rows."""
        longest = 0.0
        for number, receiver in enumerate(receivers):
            low, high = number / len(receivers), (number + 1) / len(receivers)
            seconds = 0.0
            for place, sender in enumerate(senders):
                end = min(high, (place + 1) / len(senders))
                shared = end - max(low, place / len(senders))
                if sender != receiver and shared > 0:
                    seconds += known.network.send_seconds(sender, receiver, shared * size)
            longest = max(longest, seconds)
        return longest

    return seconds_of(before, after) + seconds_of(after, before)


def hybrid(costs: Sequence[ComponentCost], ranks: int) -> Plan:
    """Return the hybrid plan: two stages of several ranks each, or on few ranks a heavy tail.

    With four ranks or more and an even number, each of two stages has half of the ranks. On fewer,
    the paper's text is followed, which gives "parameter-heavy layers" to MP: the shortest tail
    with half of the parameters is on the last rank, and all else on all ranks.
    """
    names = [cost.name for cost in costs]
    if ranks >= 4 and ranks % 2 == 0:
        work = [cost.forward_flops for cost in costs]
        return pipeline(names, work, ranks, 2, ranks // 2, None, "1f1b", f"hp:2x{ranks // 2}")
    heavy, held = len(costs), 0
    total = sum(cost.parameters for cost in costs)
    while heavy > 1 and held < HEAVY * total:
        heavy -= 1
        held += costs[heavy].parameters
    everybody, last = tuple(range(ranks)), (ranks - 1,)
    return staged({name: everybody if names.index(name) < heavy else last for name in names})


def figure_6(names: Sequence[str], ranks: int) -> Plan | None:
    """Return the plan with figure 6's labels: attention MP, MLP DP, embedding HP.

    The ranks take turns with the attentions. HP is half of the ranks, or both of two. The head,
    which figure 6 does not show, is DP. None if the model has no attention components.
    """
    attentions = [name for name in names if name.endswith(".attention")]
    if not attentions:
        return None
    everybody = tuple(range(ranks))
    held = dict.fromkeys(names, everybody)
    held[names[0]] = everybody if ranks < 4 else everybody[: ranks // 2]
    return staged(held | {name: (place % ranks,) for place, name in enumerate(attentions)})


def staged(groups: Mapping[str, Group], microbatches: int = 2) -> Plan:
    """Return the plan whose neighbouring components on the same ranks form a stage."""
    stages = [
        Stage(tuple(name for name, _ in held), ranks, (1,) * len(ranks))
        for ranks, held in groupby(groups.items(), key=itemgetter(1))
    ]
    return Plan(tuple(stages), microbatches=microbatches)


def write(folder: Path, name: str, plan: Plan) -> str:
    """Write a plan into the folder of the study and return its path.

    Raises:
        DataError: if it cannot be written.
    """
    path = folder / "plans" / f"{name}.json"
    make_folder(path.parent)
    files.write_text(path, json.dumps(plan.to_json(), indent=1) + "\n", "the plan", DataError)
    return str(path)


@dataclass(frozen=True)
class Strategy:
    """A strategy that is compared.

    Attributes:
        shape: its plan, in words.
        plan: returns a value of `--plan`, or a plan, for the components of a model, a number of
            ranks and the optimum with divided work; None if it has none there.
    """

    name: str
    shape: str
    plan: Callable[[Sequence[ComponentCost], int, Optimum], str | Plan | None]


# Large models are trained by those of table I only; so is accuracy.
STRATEGIES = (
    Strategy(SINGLE, "all components on one rank", lambda *_: "single"),
    Strategy(DP, "all components on all ranks", lambda *_: "dp"),
    Strategy(
        MP, "a pipeline of one stage per rank", lambda costs, *_: "mp" if len(costs) > 1 else None
    ),
    Strategy(
        HYBRID,
        "two stages of half of the ranks each, or on fewer than four ranks the tail with half of "
        "the parameters on one rank and the rest on all",
        lambda costs, ranks, _: hybrid(costs, ranks) if len(costs) > 1 else None,
    ),
    Strategy(
        FIGURE_6,
        "the labels of that figure, except that HP is all ranks if they are fewer than four",
        lambda costs, ranks, _: figure_6([cost.name for cost in costs], ranks),
    ),
    Strategy(
        OBJECTIVE,
        "the optimum of the paper's objective with divided work, if no other row is the same",
        lambda _, ranks, optimum: (
            staged(optimum.groups, 1) if optimum.same_as(ranks) == OBJECTIVE else None
        ),
    ),
    Strategy(ADAPTIVE, "what the planner chooses, again during training", lambda *_: "adaptive"),
)
