"""The plan: which ranks hold which components, and how a step is cut.

A plan is a value: it is made, checked, printed and saved without any process knowing of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from hvdtrain.arguments import nearest
from hvdtrain.errors import UsageError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
DEFAULT_SCHEDULE = "1f1b"
CHUNKS_A_RANK = 2  # of `mp` under the interleaved schedule
MICROBATCHES_A_STAGE = 4  # where neither the user nor a file says: GPipe's rule of thumb


@dataclass(frozen=True)
class Stage:
    """A run of components, held by each of `ranks`; `shares` are their parts of a batch."""

    components: tuple[str, ...]
    ranks: tuple[int, ...]
    shares: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Stages in the order of the model, and the micro-batches a step is cut into.

    Attributes:
        microbatches: at most so many; a batch too small for them gets fewer.
        schedule: one of SCHEDULES.
    """

    stages: tuple[Stage, ...]
    microbatches: int = 1
    schedule: str = DEFAULT_SCHEDULE

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold something, ascending."""
        return tuple(sorted({rank for stage in self.stages for rank in stage.ranks}))

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.stages) - 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The numbers of the stages that `rank` holds, ascending."""
        return tuple(i for i, stage in enumerate(self.stages) if rank in stage.ranks)

    @property
    def replicated_stages(self) -> frozenset[int]:
        """The numbers of the stages that several ranks hold."""
        return frozenset(i for i, stage in enumerate(self.stages) if len(stage.ranks) > 1)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return self.schedule == "zb-h1" and len(self.stages) > 1

    def goes_round(self) -> bool:
        """Whether the stages go round the ranks several times, each time in the same order."""
        held = [stage.ranks for stage in self.stages]
        once = list(dict.fromkeys(held))
        return len(held) > len(once) and held == once * (len(held) // len(once))

    def to_json(self) -> dict[str, Any]:
        """The plan as it stands in a plan file."""
        stages = [
            {"components": list(s.components), "ranks": list(s.ranks), "shares": list(s.shares)}
            for s in self.stages
        ]
        return {"stages": stages, "microbatches": self.microbatches, "schedule": self.schedule}


def labels(plan: Plan) -> dict[str, str]:
    """How each component is parallel: DP on all ranks, MP on one, HP on some; or single."""
    size = len(plan.ranks)

    def label(stage: Stage) -> str:
        if size == 1:
            return "single"
        return {size: "DP", 1: "MP"}.get(len(stage.ranks), "HP")

    return {name: label(stage) for stage in plan.stages for name in stage.components}


def replicated(
    components: Sequence[str], ranks: int, microbatches: int | None, schedule: str | None
) -> Plan:
    """All components on all ranks: data parallelism, or a single rank."""
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
    """`stages` stages of `replicas` ranks each, cut where the most costly one costs least.

    Where there are more stages than groups of ranks, they go round the groups: rank 0 of 2 holds
    stages 0 and 2 of 4.

    Args:
        costs: of each component, in any unit.
        name: how the user has called it.

    Raises:
        UsageError: if so many stages do not fit the model or the ranks.
    """
    name = name or f"hp:{stages}x{replicas}"
    if stages > len(components):
        raise UsageError(
            f"{name} has {stages} stages, but the model has {len(components)} component(s)"
        )
    groups, left = divmod(ranks, replicas)
    if left or not groups or stages % groups:
        raise UsageError(
            f"{name} runs on {stages * replicas} ranks (or, its stages going round, on a whole "
            f"part of them), not on {ranks}"
        )
    made, start = [], 0
    for number, size in enumerate(balance(costs, stages)):
        first = number % groups * replicas
        held = tuple(range(first, first + replicas))
        made.append(Stage(tuple(components[start : start + size]), held, (1,) * replicas))
        start += size
    default = MICROBATCHES_A_STAGE * stages if stages > 1 else 1
    return Plan(tuple(made), microbatches or default, schedule or DEFAULT_SCHEDULE)


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """Sizes of `parts` contiguous, non-empty parts of which the most costly costs least.

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
                key=lambda found: found[0],
                default=(float("inf"), []),
            )
            for i in range(number + 1)
        ]
    return best[number][1]


def check(
    plan: Plan, components: Sequence[str], ranks: int, splits_backward: Callable[[], str] = str
) -> None:
    """Refuse a plan that does not fit the model and the ranks, or that the runtime cannot run.

    Args:
        splits_backward: what forbids a backward in halves, in words; empty if nothing does.

    Raises:
        UsageError: with the reason.
    """
    held = [name for stage in plan.stages for name in stage.components]
    for name in held:
        if name not in components:
            shown = " ".join(name.split())
            raise UsageError(f"the plan names a component {shown}{nearest(name, components)}")
    if held != list(components) or not all(stage.components for stage in plan.stages):
        raise UsageError(
            "the plan must hold every component once, in the order of the model: "
            + " ".join(components)
        )
    used = set(plan.ranks)
    if beyond := sorted(used - set(range(ranks))):
        raise UsageError(f"the plan uses rank {beyond[0]}, but there are ranks 0 to {ranks - 1}")
    if idle := sorted(set(range(ranks)) - used):
        raise UsageError(f"the plan leaves rank {idle[0]} of {ranks} without a stage")
    check_schedule(plan.schedule)
    if plan.schedule == "interleaved" and len(plan.stages) > 1 and not plan.goes_round():
        raise UsageError(
            "the interleaved schedule is for ranks that hold several stages each, which go round "
            "them several times in the same order: use 1f1b, mp, or more stages"
        )
    if plan.splits_backward and (reason := splits_backward()):
        raise UsageError(f"zb-h1 splits the backward, which {reason} does not allow: use 1f1b")


def check_schedule(schedule: str) -> None:
    """Raise UsageError for a schedule that does not exist."""
    if schedule not in SCHEDULES:
        raise UsageError(f"unknown schedule {schedule}{nearest(schedule, SCHEDULES)}")


def with_options(plan: Plan, microbatches: int | None, schedule: str | None) -> Plan:
    """The plan with what the user has asked for besides; None leaves it as it is."""
    return replace(
        plan,
        microbatches=microbatches or plan.microbatches,
        schedule=schedule or plan.schedule,
    )
