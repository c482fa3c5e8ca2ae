"""Describes a plan in numbers and as a picture: stages, labels, memory and the timeline."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hvdtrain.models.costs import ComponentCost
from hvdtrain.plan import schedule
from hvdtrain.plan.actions import Action, Schedule
from hvdtrain.plan.cut import Cut, cut, sample_counts
from hvdtrain.plan.plan import Plan, labels
from hvdtrain.plan.simulate import Costs, Timeline, simulate
from hvdtrain.plan.trace import draw
from hvdtrain.plan.validate import validate
from hvdtrain.planner.cost import Memory, activation_bytes, held_memory

BACKWARD_FLOPS = 2  # forwards: one for the gradients of the input, one for those of the weights
MIB = 2**20
COUNTED = "Only computing counts here: transfers and all-reduces take no time."
TIMED_ALONE = "Each rank was timed alone: all-reduces between replicas take no time here."
LONGEST_NAMES = 44


@dataclass(frozen=True)
class Overview:
    """A plan for a model and a batch size, and a simulated step of it.

    Attributes:
        unit: unit of the timeline's times.
        remarks: lines to print below the timeline.
    """

    plan: Plan
    cut: Cut
    costs: dict[str, ComponentCost]
    optimizer: str
    recomputed: Collection[str]
    schedule: Schedule
    timeline: Timeline
    unit: str
    remarks: tuple[str, ...] = ()

    @cached_property
    def memory(self) -> dict[int, Memory]:
        """Return the memory by rank."""
        peaks = self.timeline.peak(self._activation_bytes)
        return {rank: self._memory(rank, round(peaks[rank])) for rank in self.plan.ranks}

    def as_json(self) -> dict[str, Any]:
        """Return everything as one JSON object."""
        return {
            "plan": self.plan.to_json(),
            "batch_size": self.cut.batch_size,
            "microbatches": self.cut.microbatches,
            "labels": labels(self.plan),
            "stages": [self._stage(number) for number in range(len(self.plan.stages))],
            "memory_bytes": {
                rank: vars(held) | {"total": held.total} for rank, held in self.memory.items()
            },
            "bubble_fraction": self.timeline.bubble_fraction,
            "step": {"duration": self.timeline.seconds, "unit": self.unit},
        }

    def as_text(self, width: int = 100) -> str:
        """Return everything as tables, and the timeline as a picture."""
        return "\n".join(
            [*self._stage_table(), "", *self._memory_table(), "", *self._picture(width)]
        )

    def _stage_table(self) -> list[str]:
        stages = [self._stage(number) for number in range(len(self.plan.stages))]
        flops = sum(stage["forward_flops"] for stage in stages)
        heads = f"{'ranks':<12} {'shares':<12} {'label':<6} {'parameters':>12} {'compute':>8}"
        lines = [f"stage  {heads}  components"]
        for number, stage in enumerate(stages):
            lines.append(
                f"{number:>5}  {_joined(stage['ranks']):<12} {_joined(stage['shares']):<12} "
                f"{stage['label']:<6} {stage['parameters']:>12,} "
                f"{stage['forward_flops'] / flops:>8.1%}  {_names(stage['components'])}"
            )
        return lines

    def _memory_table(self) -> list[str]:
        heads = (*Memory.__dataclass_fields__, "MiB in total")
        lines = ["rank " + "".join(f"{name:>14}" for name in heads)]
        for rank, memory in self.memory.items():
            sizes = (*vars(memory).values(), memory.total)
            lines.append(f"{rank:>4} " + "".join(f"{size / MIB:>14,.1f}" for size in sizes))
        return lines

    def _picture(self, width: int) -> list[str]:
        timeline = self.timeline
        return [
            f"{self.plan.schedule}, {self.cut.batch_size} images in {self.cut.microbatches} "
            f"micro-batch(es); a step takes {timeline.seconds:.4g} {self.unit}, "
            f"{timeline.bubble_fraction:.1%} of it bubble",
            draw(timeline.events, self.plan.ranks, width, self.unit),
            *self.remarks,
        ]

    def _stage(self, number: int) -> dict[str, Any]:
        stage = self.plan.stages[number]
        costs = [self.costs[name] for name in stage.components]
        return {
            "components": list(stage.components),
            "ranks": list(stage.ranks),
            "shares": list(stage.shares),
            "label": labels(self.plan)[stage.components[0]],
            "parameters": sum(cost.parameters for cost in costs),
            "forward_flops": sum(cost.forward_flops for cost in costs),
            "output_bytes": costs[-1].output_bytes,
        }

    def _memory(self, rank: int, activations: int) -> Memory:
        names = [n for s in self.plan.stages_of(rank) for n in self.plan.stages[s].components]
        costs = [self.costs[name] for name in names]
        return held_memory(costs, self.optimizer, activations)

    def _activation_bytes(self, rank: int, action: Action) -> float:
        """Return the bytes that a forward keeps for its backward."""
        assert action.microbatch is not None
        rows = self.cut.rows(action.stage, rank, action.microbatch)
        costs = [self.costs[name] for name in self.plan.stages[action.stage].components]
        return activation_bytes(costs, rows, self.recomputed)


def overview(
    plan: Plan,
    costs: Sequence[ComponentCost],
    batch_size: int,
    optimizer: str,
    recomputed: Collection[str] = (),
    measured: Costs | None = None,
    synchronised: Collection[int] = (),
) -> Overview:
    """Cut a batch, make the schedule, validate it and simulate it.

    Args:
        measured: seconds of actions; without them the simulation uses counted operations.
        synchronised: stages whose batch norms communicate.

    Raises:
        ScheduleError: if the schedule is not a correct step of the plan.
    """
    pieces = cut(plan, batch_size)
    actions = schedule.training_step(plan, pieces)
    validate(actions, plan, pieces, synchronised=frozenset(synchronised))
    return played(*(plan, pieces, actions, costs, optimizer, recomputed, measured, synchronised))


def played(
    plan: Plan,
    pieces: Cut,
    actions: Schedule,
    costs: Sequence[ComponentCost],
    optimizer: str,
    recomputed: Collection[str] = (),
    measured: Costs | None = None,
    synchronised: Collection[int] = (),
    remarks: tuple[str, ...] | None = None,
) -> Overview:
    """Return the overview of a schedule without validating it; see `overview`."""
    by_name = {cost.name: cost for cost in costs}
    action_costs = measured or counted_costs(plan, pieces, by_name)
    timeline = simulate(actions, plan, pieces, action_costs, synchronised=frozenset(synchronised))
    counted = measured is None
    if remarks is None:
        remarks = (COUNTED if counted else TIMED_ALONE,)
        remarks += batch_norm_remark(plan, pieces, costs, synchronised)
    unit = "GFLOP" if counted else "s"
    return Overview(
        *(plan, pieces, by_name, optimizer, recomputed, actions, timeline, unit, remarks)
    )


def batch_norm_remark(
    plan: Plan, pieces: Cut, costs: Sequence[ComponentCost], synchronised: Collection[int]
) -> tuple[str, ...]:
    """Return a line if batch norm computes something else than on one rank; otherwise none."""
    normed = [cost.name for cost in costs if cost.batch_norms]
    counts = sample_counts(plan, pieces, normed, synchronised)
    if not counts or counts == [pieces.batch_size]:
        return ()
    range_ = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return (
        f"Batch norm normalises over {range_} samples here, over {pieces.batch_size} on one rank: "
        "its statistics differ.",
    )


def counted_costs(plan: Plan, pieces: Cut, costs: Mapping[str, ComponentCost]) -> Costs:
    """Return the costs of actions in GFLOP.

    A backward costs as much as two forwards; communication costs nothing.
    """
    of_stage = [sum(costs[name].forward_flops for name in s.components) for s in plan.stages]
    factors = {"F": 1, "B": BACKWARD_FLOPS, "I": 1, "W": 1}

    def compute(rank: int, action: Action) -> float:
        if action.kind not in factors or action.microbatch is None:
            return 0.0
        rows = pieces.rows(action.stage, rank, action.microbatch)
        return factors[action.kind] * of_stage[action.stage] * rows / 1e9

    return Costs(compute, lambda sender, receiver, action: 0.0, lambda stage: 0.0)


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _names(components: Sequence[str]) -> str:
    text = " ".join(components)
    if len(text) <= LONGEST_NAMES:
        return text
    return f"{components[0]} ... {components[-1]} ({len(components)})"
