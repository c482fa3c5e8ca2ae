"""A plan with a simulated step, in numbers and as a picture: stages, labels, memory, timeline.

An `Overview` needs no measurements; a `Candidate` is a plan whose step is predicted.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hvdtrain.models.costs import ComponentCost
from hvdtrain.plan.actions import Action, Schedule
from hvdtrain.plan.cut import Cut, cut, sample_counts
from hvdtrain.plan.plan import Plan, labels
from hvdtrain.plan.schedule import training_step
from hvdtrain.plan.simulate import Costs, Simulation, simulate
from hvdtrain.plan.trace import draw
from hvdtrain.plan.validate import validate
from hvdtrain.planner.cost import (
    Known,
    Question,
    plan_costs,
)
from hvdtrain.planner.memory import (
    BUFFERS,
    Memory,
    activation_bytes,
    held_memory,
    lasting_bytes,
    process_bytes,
)
from hvdtrain.planner.profile import RankTimes

BACKWARD_FLOPS = 2  # forwards: one for the gradients of the input, one for those of the weights
MIB = 2**20
COUNTED = "Only computing counts here: transfers and all-reduces take no time."
TIMED_ALONE = "Each rank was timed alone: all-reduces between replicas take no time here."
LONGEST_NAMES = 44
WORK, TRANSFER = "compute", "communication"  # kinds of a timeline's events


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
    timeline: Simulation
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
    *,
    recomputed: Collection[str] = (),
    measured: Costs | None = None,
    is_synchronised: bool = False,
) -> Overview:
    """Cut a batch, make the schedule, validate it and simulate it.

    Args:
        measured: seconds of actions; without them the simulation uses counted operations.
        is_synchronised: whether the batch norms of replicas communicate.

    Raises:
        ScheduleError: if the schedule is not a correct step of the plan.
    """
    pieces = cut(plan, batch_size)
    actions = training_step(plan, pieces)
    together = plan.replicated_stages if is_synchronised else frozenset()
    validate(actions, plan, pieces, synchronised=together)
    by_name = {cost.name: cost for cost in costs}
    action_costs = measured or counted_costs(plan, pieces, by_name)
    return Overview(
        plan=plan,
        cut=pieces,
        costs=by_name,
        optimizer=optimizer,
        recomputed=recomputed,
        schedule=actions,
        timeline=simulate(actions, plan, pieces, action_costs, synchronised=together),
        unit="s" if measured else "GFLOP",
        remarks=(
            TIMED_ALONE if measured else COUNTED,
            *batch_norm_remark(plan, pieces, costs, together),
        ),
    )


def batch_norm_remark(
    plan: Plan, pieces: Cut, costs: Sequence[ComponentCost], synchronised: Collection[int]
) -> tuple[str, ...]:
    """Return a warning if batch norm differs from that of one rank, otherwise nothing."""
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


@dataclass(frozen=True)
class Candidate:
    """A plan with its name and a simulated step.

    Attributes:
        replicas: number of replicas of each stage, those that are not simulated included.
    """

    name: str
    overview: Overview
    ranks: tuple[RankTimes, ...]
    replicas: tuple[int, ...]

    @property
    def plan(self) -> Plan:
        """Return the plan."""
        return self.overview.plan

    @property
    def seconds(self) -> float:
        """Return the predicted seconds per step."""
        return self.overview.timeline.seconds

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Return the peak memory of each rank in bytes, with its process and temporary copies."""
        return tuple(
            process_bytes(
                lasting=self._lasting_bytes(rank),
                activations=held.activations,
                resident=self.ranks[rank].resident_bytes,
                factor=self.ranks[rank].activation_factor,
            )
            for rank, held in sorted(self.overview.memory.items())
        )

    def _lasting_bytes(self, rank: int) -> int:
        costs, optimizer = self.overview.costs, self.overview.optimizer
        total = 0
        for number in self.plan.stages_of(rank):
            held = [costs[name] for name in self.plan.stages[number].components]
            total += lasting_bytes(held, optimizer, self.replicas[number])
            total += self._buffer_bytes(rank, number)
        return total

    def _buffer_bytes(self, rank: int, number: int) -> int:
        """Return the bytes of a stage's inputs and gradients at its boundaries."""
        plan, pieces, costs = self.plan, self.overview.cut, self.overview.costs
        rows = max(pieces.rows(number, rank, k) for k in range(pieces.microbatches))
        before, behind = (
            costs[plan.stages[stage].components[-1]].output_bytes if 0 <= stage < plan.last else 0
            for stage in (number - 1, number)
        )
        in_flight = self.overview.timeline.peak_in_flight.get((rank, number), 0)
        return rows * ((in_flight + BUFFERS) * before + BUFFERS * behind)

    @property
    def own_seconds(self) -> tuple[float, ...]:
        """Return the seconds per step that each rank computes."""
        return self._spent_on(WORK)

    @property
    def transfer_seconds(self) -> tuple[float, ...]:
        """Return the seconds per step that each rank spends on sending and receiving."""
        return self._spent_on(TRANSFER)

    def _spent_on(self, kind: str) -> tuple[float, ...]:
        events = self.overview.timeline.events
        return tuple(
            sum(
                event.end - event.start
                for event in events
                if (event.rank, event.kind) == (rank, kind)
            )
            for rank in self.plan.ranks
        )

    def shortage(self, limits: Sequence[float] | None) -> float:
        """Return the bytes by which the worst rank exceeds its limit; 0 if the plan fits."""
        if limits is None:
            return 0.0
        pairs = zip(self.rank_bytes, limits, strict=True)
        return max(0.0, *(held - limit for held, limit in pairs))

    def to_json(self) -> dict[str, Any]:
        """Return the plan and its predicted seconds as JSON for a log."""
        plan = self.plan
        return {
            "name": self.name,
            "seconds": self.seconds,
            "stages": [[len(s.components), list(s.ranks), list(s.shares)] for s in plan.stages],
            "microbatches": plan.microbatches,
            "schedule": plan.schedule,
        }


def play(question: Question, plan: Plan, name: str) -> Candidate:
    """Simulate a step of a plan; the schedule is validated where it is used."""
    pieces = cut(plan, question.batch_size)
    costs = plan_costs(plan, pieces, question.known)
    return played(question, plan, pieces, costs, name, [len(stage.ranks) for stage in plan.stages])


def played(
    question: Question, plan: Plan, pieces: Cut, costs: Costs, name: str, replicas: Sequence[int]
) -> Candidate:
    """Simulate a step of a plan with these costs.

    Args:
        replicas: number of replicas of each stage, as in `Candidate`.
    """
    known, actions = question.known, training_step(plan, pieces)
    together = plan.replicated_stages if known.is_synchronised else frozenset()
    predicted = Overview(
        plan=plan,
        cut=pieces,
        costs=dict(known.by_name),
        optimizer=question.optimizer,
        recomputed=known.recomputed,
        schedule=actions,
        timeline=simulate(actions, plan, pieces, costs, synchronised=together),
        unit="s",
    )
    return Candidate(name, predicted, known.profile.ranks, tuple(replicas))


def component_table(question: Question, plan: Plan) -> list[str]:
    """Return a table of the components: times for their samples, bytes, label and ranks."""
    known, label_of = question.known, labels(plan)
    lines = [
        f"{'component':<24}{'forward ms':>12}{'backward ms':>12}{'update ms':>11}"
        f"{'MiB':>9}{'out KiB':>9}  {'label':<7}ranks"
    ]
    for stage in plan.stages:
        rows = -(-question.batch_size * stage.shares[0] // sum(stage.shares))
        for name in stage.components:
            times = known.profile.ranks[stage.ranks[0]].components[name]
            cost = known.by_name[name]
            lines.append(
                f"{name[:23]:<24}{1e3 * times.forward(rows):>12.3f}"
                f"{1e3 * times.backward(rows):>12.3f}{1e3 * times.update:>11.3f}"
                f"{cost.parameter_bytes / MIB:>9.2f}{cost.output_bytes / 1024:>9.1f}  "
                f"{label_of[name]:<7}{','.join(map(str, stage.ranks))}"
            )
    return lines


def paper_objective(known: Known, plan: Plan, batch_size: int) -> float:
    """Return paper B's objective: the sum of computing and communication over all components.

    Baligodugula and Amsaad, arXiv 2503.23186: sum of t_comp(c_i) + t_comm(c_i, s_i), in seconds.
    It knows neither overlap nor the bubble of a pipeline, and runs stages one after another.
    """
    seconds = 0.0
    last = plan.last
    for number, stage in enumerate(plan.stages):
        rows = -(-batch_size // len(stage.ranks))
        for name in stage.components:
            times = known.profile.ranks[stage.ranks[0]].components[name]
            seconds += times.forward(rows) + times.backward(rows)
            if len(stage.ranks) > 1:
                size = known.by_name[name].parameter_bytes
                seconds += known.network.reduce_seconds(stage.ranks, size)
        if number < last:
            size = known.by_name[stage.components[-1]].output_bytes * rows
            behind = plan.stages[number + 1].ranks[0]
            seconds += 2 * known.send_seconds(stage.ranks[0], behind, size)
    return seconds


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _names(components: Sequence[str]) -> str:
    text = " ".join(components)
    if len(text) <= LONGEST_NAMES:
        return text
    return f"{components[0]} ... {components[-1]} ({len(components)})"
