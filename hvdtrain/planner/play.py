"""Simulates plans with the times of ranks and network: candidates for a choice."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hvdtrain.parallel.cut import cut
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.schedule import training_step
from hvdtrain.planner.components import RankTimes
from hvdtrain.planner.cost import plan_costs
from hvdtrain.planner.network import MeasuredNetwork
from hvdtrain.planner.overview import Overview, copies_held, played
from hvdtrain.planner.tables import Question

WORK, TRANSFER = "compute", "communication"  # kinds of a timeline's events
LITTLE = 0.1  # part of a step below which a rank's time says nothing about its speed
MOST_SLOWER = 10.0  # a network may be this many times slower, or faster, than measured


@dataclass(frozen=True)
class Candidate:
    """A plan with its name and a simulated step."""

    name: str
    overview: Overview
    ranks: tuple[RankTimes, ...]

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
        memory = self.overview.memory
        return tuple(
            held.total
            + round((self.ranks[rank].activation_factor - 1) * held.activations)
            + self.ranks[rank].resident_bytes
            + self._copied_bytes(rank)
            for rank, held in sorted(memory.items())
        )

    def _copied_bytes(self, rank: int) -> int:
        """Return the bytes of the temporary copies for a checkpoint and for all-reduces."""
        plan, costs = self.plan, self.overview.costs
        return sum(
            round(
                copies_held(self.overview.optimizer, len(plan.stages[stage].ranks))
                * costs[name].parameter_bytes
            )
            for stage in plan.stages_of(rank)
            for name in plan.stages[stage].components
        )

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


def play(question: Question, plan: Plan, name: str) -> Candidate:
    """Simulate a step of a plan; the schedule is validated where it is used."""
    known = question.known
    pieces = cut(plan, question.batch_size)
    simulated = played(
        *(plan, pieces, training_step(plan, pieces), known.costs, question.optimizer),
        known.recomputed,
        plan_costs(plan, pieces, known),
        plan.replicated_stages if known.is_synchronised else (),
        remarks=(),
    )
    return Candidate(name, simulated, known.profile.ranks)


def calibrated(
    question: Question,
    plan: Plan,
    own_seconds: Sequence[float],
    step_seconds: float | None = None,
) -> Question:
    """Return the question with ranks and network as slow as measured steps of `plan` show.

    So a profile includes the cost of sharing the machine with other processes, which short
    measurements of components do not show.

    Args:
        own_seconds: seconds per step of each rank, without waiting for other ranks.
        step_seconds: seconds of the whole step, to adapt the network to the waiting time.
    """
    known, predicted = question.known, play(question, plan, "")
    # A rank that computes next to nothing only shows the overhead of a step.
    factors = [
        measured / expected if expected > LITTLE * predicted.seconds else 1.0
        for measured, expected in zip(own_seconds, predicted.own_seconds, strict=True)
    ]
    scaled = replace(question, known=replace(known, profile=known.profile.scaled(factors)))
    if step_seconds is None:
        return scaled
    again = play(scaled, plan, "")
    waited = step_seconds - max(own_seconds)
    expected = again.seconds - max(again.own_seconds)
    if not isinstance(known.network, MeasuredNetwork) or expected <= 0 or waited <= 0:
        return scaled
    slower = min(MOST_SLOWER, max(1 / MOST_SLOWER, waited / expected))
    network = known.network.scaled(slower)
    return replace(scaled, known=replace(scaled.known, network=network))
