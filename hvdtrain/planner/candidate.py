"""A plan with a simulated step: its seconds, its timeline and the memory of its ranks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hvdtrain.models.costs import ComponentCost
from hvdtrain.plan.cut import Action, Cut, Schedule, cut, sample_counts
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.schedule import training_step
from hvdtrain.plan.simulate import Costs, Simulation, simulate
from hvdtrain.plan.validate import validate
from hvdtrain.planner.cost import Question, plan_costs
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
COUNTED = "Only computing counts here: transfers and all-reduces take no time."
WORK, TRANSFER = "compute", "communication"  # kinds of a timeline's events


@dataclass(frozen=True)
class Candidate:
    """A plan for a model and a batch size, and a simulated step of it.

    Attributes:
        unit: unit of the timeline's times: s if they are predicted, GFLOP if they are counted.
        ranks: measured or predicted times by rank; empty if operations are counted.
        remarks: lines to print below the timeline.
    """

    name: str
    plan: Plan
    cut: Cut
    costs: Mapping[str, ComponentCost]
    optimizer: str
    recomputed: Collection[str]
    schedule: Schedule
    timeline: Simulation
    unit: str
    ranks: tuple[RankTimes, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Return the predicted seconds per step."""
        return self.timeline.seconds

    @cached_property
    def memory(self) -> dict[int, Memory]:
        """Return the counted memory by rank."""

        def kept(rank: int, action: Action) -> float:
            """Return the bytes that a forward keeps for its backward."""
            assert action.microbatch is not None
            rows = self.cut.rows(action.stage, rank, action.microbatch)
            return activation_bytes(self.costs_of(action.stage), rows, self.recomputed)

        peaks = self.timeline.peak(kept)
        return {
            rank: held_memory(
                [cost for number in self.plan.stages_of(rank) for cost in self.costs_of(number)],
                self.optimizer,
                round(peaks[rank]),
            )
            for rank in self.plan.ranks
        }

    def costs_of(self, stage: int) -> list[ComponentCost]:
        """Return the costs of a stage's components."""
        return [self.costs[name] for name in self.plan.stages[stage].components]

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Return the peak memory of each rank in bytes, with its process and temporary copies."""
        return tuple(
            process_bytes(
                lasting=sum(
                    lasting_bytes(
                        self.costs_of(number), self.optimizer, len(self.plan.stages[number].ranks)
                    )
                    + self._buffer_bytes(rank, number)
                    for number in self.plan.stages_of(rank)
                ),
                activations=held.activations,
                resident=self.ranks[rank].resident_bytes,
                factor=self.ranks[rank].activation_factor,
            )
            for rank, held in sorted(self.memory.items())
        )

    def _buffer_bytes(self, rank: int, number: int) -> int:
        """Return the bytes of a stage's inputs and gradients at its boundaries."""
        rows = max(self.cut.rows(number, rank, k) for k in range(self.cut.microbatches))
        before, behind = (
            self.costs_of(stage)[-1].output_bytes if 0 <= stage < self.plan.last else 0
            for stage in (number - 1, number)
        )
        in_flight = self.timeline.peak_in_flight.get((rank, number), 0)
        return rows * ((in_flight + BUFFERS) * before + BUFFERS * behind)

    def spent_on(self, kind: str) -> tuple[float, ...]:
        """Return the seconds per step that each rank spends on WORK or on TRANSFER."""
        spent = dict.fromkeys(self.plan.ranks, 0.0)
        for event in self.timeline.events:
            if event.kind == kind:
                spent[event.rank] += event.end - event.start
        return tuple(spent.values())

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


def counted(
    plan: Plan,
    costs: Sequence[ComponentCost],
    batch_size: int,
    optimizer: str,
    recomputed: Collection[str] = (),
    is_synchronised: bool = False,
) -> Candidate:
    """Return a plan with a step that is timed by counted operations.

    A backward costs as much as two forwards; communication costs nothing.

    Args:
        is_synchronised: whether the batch norms of replicas communicate.

    Raises:
        ScheduleError: if the schedule is not a correct step of the plan.
    """
    pieces = cut(plan, batch_size)
    schedule = training_step(plan, pieces)
    together = plan.replicated_stages if is_synchronised else frozenset()
    validate(schedule, plan, pieces, synchronised=together)
    by_name = {cost.name: cost for cost in costs}
    of_stage = [sum(by_name[name].forward_flops for name in s.components) for s in plan.stages]
    factors = {"F": 1, "B": BACKWARD_FLOPS, "I": 1, "W": 1}

    def compute(rank: int, action: Action) -> float:
        if action.kind not in factors or action.microbatch is None:
            return 0.0
        rows = pieces.rows(action.stage, rank, action.microbatch)
        return factors[action.kind] * of_stage[action.stage] * rows / 1e9

    gflops = Costs(compute)
    remarks = [COUNTED]
    normed = [cost.name for cost in costs if cost.batch_norms]
    counts = sample_counts(plan, pieces, normed, together)
    if counts and counts != [pieces.batch_size]:
        range_ = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
        remarks.append(
            f"Batch norm normalises over {range_} samples here, over {pieces.batch_size} on one "
            "rank: its statistics differ."
        )
    return Candidate(
        name="",
        plan=plan,
        cut=pieces,
        costs=by_name,
        optimizer=optimizer,
        recomputed=recomputed,
        schedule=schedule,
        timeline=simulate(schedule, plan, pieces, gflops, synchronised=together),
        unit="GFLOP",
        remarks=tuple(remarks),
    )


def play(question: Question, plan: Plan, name: str) -> Candidate:
    """Simulate a step of a plan; the schedule is validated where it is used."""
    known, pieces = question.known, cut(plan, question.batch_size)
    schedule, costs = training_step(plan, pieces), plan_costs(plan, pieces, known)
    together = plan.replicated_stages if known.is_synchronised else frozenset()
    return Candidate(
        name=name,
        plan=plan,
        cut=pieces,
        costs=known.by_name,
        optimizer=question.optimizer,
        recomputed=known.recomputed,
        schedule=schedule,
        timeline=simulate(schedule, plan, pieces, costs, synchronised=together),
        unit="s",
        ranks=known.profile.ranks,
    )
