"""What a plan means, in numbers and as a picture: stages, labels, memory and the timeline."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hvdtrain.models.costs import ComponentCost
from hvdtrain.parallel import schedule
from hvdtrain.parallel.actions import Action, Schedule
from hvdtrain.parallel.cut import Cut, cut
from hvdtrain.parallel.normgroups import sample_counts
from hvdtrain.parallel.plan import Plan, labels
from hvdtrain.parallel.simulate import Costs, Timeline, simulate
from hvdtrain.parallel.trace import draw
from hvdtrain.parallel.validate import validate

OPTIMIZER_COPIES = {"sgd": 1, "adam": 2, "adamw": 2}  # of the parameters
BACKWARD_FLOPS = 2  # of a forward: gradients of the input, and of the weights
MIB = 2**20
COUNTED = "Computing alone is counted: handing over and reducing are free here."
TIMED_ALONE = "Each rank was timed alone; reductions between replicas are free here."
LONGEST_NAMES = 44


def copies_held(optimizer: str, replicas: int) -> float:
    """Copies of the parameters for a moment: a checkpoint's, and Horovod's of gradients.

    A checkpoint is written from a copy while training goes on; each replica has a part of it.
    """
    return (1 + OPTIMIZER_COPIES[optimizer]) / replicas + (replicas > 1)


@dataclass(frozen=True)
class Memory:
    """What a rank holds, in bytes; activations at their peak."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Overview:
    """A plan for a model and a batch size, and a simulated step of it."""

    plan: Plan
    cut: Cut
    costs: dict[str, ComponentCost]
    optimizer: str
    recomputed: Collection[str]
    schedule: Schedule
    timeline: Timeline
    unit: str  # of the timeline's times
    remarks: tuple[str, ...] = ()

    @cached_property
    def memory(self) -> dict[int, Memory]:
        """By rank."""
        peaks = self.timeline.peak(self._activation_bytes)
        return {rank: self._memory(rank, round(peaks[rank])) for rank in self.plan.ranks}

    def as_json(self) -> dict[str, Any]:
        """All of it, as one JSON object."""
        return {
            "plan": self.plan.to_json(),
            "batch_size": self.cut.batch_size,
            "microbatches": self.cut.microbatches,
            "labels": labels(self.plan),
            "stages": [self._stage(number) for number in range(len(self.plan.stages))],
            "memory_bytes": {
                rank: vars(found) | {"total": found.total} for rank, found in self.memory.items()
            },
            "bubble_fraction": self.timeline.bubble_fraction,
            "step": {"duration": self.timeline.seconds, "unit": self.unit},
        }

    def as_text(self, width: int = 100) -> str:
        """The same as tables, and the timeline as a picture."""
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
        heads = (*Memory.__dataclass_fields__, "MiB together")
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
        found = [self.costs[name] for name in stage.components]
        return {
            "components": list(stage.components),
            "ranks": list(stage.ranks),
            "shares": list(stage.shares),
            "label": labels(self.plan)[stage.components[0]],
            "parameters": sum(cost.parameters for cost in found),
            "forward_flops": sum(cost.forward_flops for cost in found),
            "output_bytes": found[-1].output_bytes,
        }

    def _memory(self, rank: int, activations: int) -> Memory:
        names = [n for s in self.plan.stages_of(rank) for n in self.plan.stages[s].components]
        weights = sum(self.costs[name].parameter_bytes for name in names)
        buffers = sum(self.costs[name].buffer_bytes for name in names)
        copies = OPTIMIZER_COPIES[self.optimizer]
        return Memory(weights + buffers, weights, copies * weights, activations)

    def _activation_bytes(self, rank: int, action: Action) -> float:
        """What a forward leaves for its backward: components that recompute keep their input."""
        assert action.microbatch is not None
        stage = self.plan.stages[action.stage]
        rows = self.cut.rows(action.stage, rank, action.microbatch)
        costs = [self.costs[name] for name in stage.components]
        kept = [cost for cost in costs if cost.name not in self.recomputed]
        each = sum(cost.output_bytes for cost in costs) + sum(cost.saved_bytes for cost in kept)
        return float(rows * each + (sum(cost.fixed_bytes for cost in kept) if rows else 0))


def overview(
    plan: Plan,
    costs: Sequence[ComponentCost],
    batch_size: int,
    optimizer: str,
    recomputed: Collection[str] = (),
    measured: Costs | None = None,
    synchronised: Collection[int] = (),
) -> Overview:
    """Cut a batch, make the schedule, prove it, and play it through.

    Args:
        measured: seconds of actions; without them a step is played through in counted operations.
        synchronised: stages whose batch norms communicate.

    Raises:
        ScheduleError: if the schedule were not a correct step of the plan.
    """
    pieces = cut(plan, batch_size)
    made = schedule.training_step(plan, pieces)
    validate(made, plan, pieces, synchronised=frozenset(synchronised))
    return played(*(plan, pieces, made, costs, optimizer, recomputed, measured, synchronised))


def played(
    plan: Plan,
    pieces: Cut,
    made: Schedule,
    costs: Sequence[ComponentCost],
    optimizer: str,
    recomputed: Collection[str] = (),
    measured: Costs | None = None,
    synchronised: Collection[int] = (),
    remarks: tuple[str, ...] | None = None,
) -> Overview:
    """As `overview`, of a schedule that is taken to be correct."""
    by_name = {cost.name: cost for cost in costs}
    given = measured or counted_costs(plan, pieces, by_name)
    timeline = simulate(made, plan, pieces, given, synchronised=frozenset(synchronised))
    counted = measured is None
    if remarks is None:
        remarks = (COUNTED if counted else TIMED_ALONE,)
        remarks += batch_norm_remark(plan, pieces, costs, synchronised)
    unit = "GFLOP" if counted else "s"
    return Overview(*(plan, pieces, by_name, optimizer, recomputed, made, timeline, unit, remarks))


def batch_norm_remark(
    plan: Plan, pieces: Cut, costs: Sequence[ComponentCost], synchronised: Collection[int]
) -> tuple[str, ...]:
    """A line where batch norm computes something else than on one rank; none otherwise."""
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
    """Costs of actions in GFLOP, backward two forwards, and communication free."""
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
