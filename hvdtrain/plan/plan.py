"""Plans: the components that each rank holds, and the micro-batches of a step.

A plan is a plain value: making, checking, printing and saving it needs no running processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from hvdtrain.errors import UsageError
from hvdtrain.options.names import nearest

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")  # `schedule.POLICIES` has their rules
DEFAULT_SCHEDULE = "1f1b"
CHUNKS_PER_RANK = 2  # stages per rank of `mp` under the interleaved schedule
MICROBATCHES_PER_STAGE = 4  # the default: GPipe's rule of thumb


@dataclass(frozen=True)
class Stage:
    """Consecutive components on some ranks, with each rank's share of a batch."""

    components: tuple[str, ...]
    ranks: tuple[int, ...]
    shares: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Stages in the order of the model, and the micro-batches per step.

    Attributes:
        stages: the stages.
        microbatches: the most per step; a batch that is too small is cut into fewer.
        schedule: one of SCHEDULES.
    """

    stages: tuple[Stage, ...]
    microbatches: int = 1
    schedule: str = DEFAULT_SCHEDULE

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold a stage, ascending."""
        return tuple(sorted({rank for stage in self.stages for rank in stage.ranks}))

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.stages) - 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the stages that `rank` holds, ascending."""
        return tuple(i for i, stage in enumerate(self.stages) if rank in stage.ranks)

    @property
    def replicated_stages(self) -> frozenset[int]:
        """The numbers of the stages that several ranks hold."""
        return frozenset(i for i, stage in enumerate(self.stages) if len(stage.ranks) > 1)

    @property
    def splits_backward(self) -> bool:
        """Return whether weight gradients are computed separately from input gradients."""
        return self.schedule == "zb-h1" and len(self.stages) > 1

    def repeats_groups(self) -> bool:
        """Return whether the stages repeat the groups of ranks, each time in the same order."""
        held = [stage.ranks for stage in self.stages]
        once = list(dict.fromkeys(held))
        return len(held) > len(once) and held == once * (len(held) // len(once))

    def to_json(self) -> dict[str, Any]:
        """Return the content of a plan file."""
        stages = [
            {"components": list(s.components), "ranks": list(s.ranks), "shares": list(s.shares)}
            for s in self.stages
        ]
        return {"stages": stages, "microbatches": self.microbatches, "schedule": self.schedule}


def labels(plan: Plan) -> dict[str, str]:
    """Return the kind of parallelism of each component, by name.

    DP is on all ranks, MP on one, HP on several; "single" if there is only one rank.
    """
    size = len(plan.ranks)

    def label(stage: Stage) -> str:
        if size == 1:
            return "single"
        return {size: "DP", 1: "MP"}.get(len(stage.ranks), "HP")

    return {name: label(stage) for stage in plan.stages for name in stage.components}


def replicated(
    components: Sequence[str], ranks: int, microbatches: int | None, schedule: str | None
) -> Plan:
    """Return the plan with all components on all ranks: data parallelism, or a single rank."""
    stage = Stage(tuple(components), tuple(range(ranks)), (1,) * ranks)
    return Plan((stage,), microbatches or 1, schedule or DEFAULT_SCHEDULE)


def pipeline(
    components: Sequence[str],
    costs: Sequence[float],
    ranks: int,
    stages: int,
    replicas: int,
    microbatches: int | None = None,
    schedule: str | None = None,
    name: str | None = None,
) -> Plan:
    """Return a plan of `stages` stages of `replicas` ranks each, balanced by costs.

    If there are more stages than groups of ranks, the stages repeat the groups: with 4 stages on
    2 ranks, rank 0 holds stages 0 and 2.

    Args:
        components: the names of the model's components, in order.
        costs: of each component, in any unit.
        ranks: the world size.
        stages: the number of stages.
        replicas: the number of ranks per stage.
        microbatches: per step; by default several per stage.
        schedule: one of SCHEDULES.
        name: the plan as the user typed it, for errors.

    Raises:
        UsageError: if the number of stages does not fit the model or the ranks.
    """
    name = name or f"hp:{stages}x{replicas}"
    count = len(components)
    if stages > count:
        advice = "use single or dp, or hvdtrain.cut" if count == 1 else "use fewer stages"
        raise UsageError(
            f"{name} has {stages} stages, but the model has {count} component(s): {advice}"
        )
    groups, left = divmod(ranks, replicas)
    if left or not groups or stages % groups:
        possible = [str(replicas * n) for n in range(1, stages + 1) if stages % n == 0]
        raise UsageError(f"{name} does not fit {ranks} ranks: start {' or '.join(possible)}")
    made, start = [], 0
    for number, size in enumerate(balance(costs, stages)):
        first = number * replicas % ranks
        held = tuple(range(first, first + replicas))
        made.append(Stage(tuple(components[start : start + size]), held, (1,) * replicas))
        start += size
    default = MICROBATCHES_PER_STAGE * stages if stages > 1 else 1
    return Plan(tuple(made), microbatches or default, schedule or DEFAULT_SCHEDULE)


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """Return the sizes of `parts` contiguous, non-empty parts with the least largest cost.

    The exact dynamic programme of linear partitioning (Skiena, The Algorithm Design Manual, 8.5).
    """
    sums = [0.0, *accumulate(costs)]
    number = len(costs)
    # best[i]: (cost, sizes) of the first i components in the parts so far
    best: list[tuple[float, list[int]]] = [(sums[i], [i]) for i in range(number + 1)]
    for part in range(2, parts + 1):
        best = [
            min(
                (
                    (max(best[j][0], sums[i] - sums[j]), [*best[j][1], i - j])
                    for j in range(part - 1, i)
                ),
                key=lambda candidate: candidate[0],
                default=(float("inf"), []),
            )
            for i in range(number + 1)
        ]
    return best[number][1]


def check(
    plan: Plan, components: Sequence[str], ranks: int, splits_backward: Callable[[], str] = str
) -> None:
    """Check that a plan fits the model and the ranks, and that the runtime can run it.

    Args:
        plan: the plan.
        components: the names of the model's components, in order.
        ranks: the world size.
        splits_backward: returns what forbids a split backward, in words; "" if nothing does.

    Raises:
        UsageError: if it does not.
    """
    held = [name for stage in plan.stages for name in stage.components]
    for name in held:
        if name not in components:
            shown = " ".join(name.split())
            hint = nearest(name, components)
            raise UsageError(f"the plan names an unknown component {shown}{hint}")
    if held != list(components) or not all(stage.components for stage in plan.stages):
        raise UsageError(
            "the plan must hold every component once, in the order of the model: "
            + " ".join(components)
        )
    used = set(plan.ranks)
    if beyond := sorted(used - set(range(ranks))):
        raise UsageError(
            f"the plan uses rank {beyond[0]}, but there are ranks 0 to {ranks - 1}: "
            "start more ranks or change the plan"
        )
    if idle := sorted(set(range(ranks)) - used):
        raise UsageError(
            f"the plan leaves rank {idle[0]} of {ranks} without a stage: "
            "start fewer ranks or change the plan"
        )
    check_schedule(plan.schedule)
    if plan.schedule == "interleaved" and len(plan.stages) > 1 and not plan.repeats_groups():
        raise UsageError(
            "the interleaved schedule needs several stages per rank, with the same order of ranks "
            "each time: use 1f1b, mp, or more stages"
        )
    if plan.splits_backward and (reason := splits_backward()):
        raise UsageError(f"zb-h1 splits the backward, which {reason} does not allow: use 1f1b")


def check_schedule(schedule: str) -> None:
    """Raise UsageError for an unknown schedule."""
    if schedule not in SCHEDULES:
        raise UsageError(f"unknown schedule {schedule}{nearest(schedule, SCHEDULES)}")


def with_options(plan: Plan, microbatches: int | None, schedule: str | None) -> Plan:
    """Return the plan with the micro-batches and schedule of the options; None changes nothing."""
    return replace(
        plan,
        microbatches=microbatches or plan.microbatches,
        schedule=schedule or plan.schedule,
    )


class Move(NamedTuple):
    """The transfer of one component from a rank that holds it to a rank that needs it."""

    component: str
    sender: int
    receiver: int


def is_same_layout(before: Plan, after: Plan) -> bool:
    """Return whether every rank holds the same stages: then nothing is moved or rebuilt."""
    pairs = [[(stage.components, stage.ranks) for stage in p.stages] for p in (before, after)]
    return pairs[0] == pairs[1]


def moves(before: Plan, after: Plan) -> list[Move]:
    """Return the components that ranks need under `after` and do not hold under `before`.

    The moves are in the order of the model. Replicas take turns as senders, to share the load.
    """
    held = _holders(before)
    transfers: list[Move] = []
    for component, receivers in _holders(after).items():
        senders = held[component]
        lacking = [rank for rank in receivers if rank not in senders]
        for receiver in lacking:
            transfers.append(Move(component, senders[len(transfers) % len(senders)], receiver))
    return transfers


def _holders(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {name: stage.ranks for stage in plan.stages for name in stage.components}
