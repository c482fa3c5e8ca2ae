"""Plays plans through with what is known of ranks and network: candidates for a choice."""

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
LITTLE = 0.1  # of a step
MOST_SLOWER = 10.0  # or faster, than a network was measured to be


@dataclass(frozen=True)
class Candidate:
    """A plan with its name and what a step of it is predicted to take."""

    name: str
    overview: Overview
    ranks: tuple[RankTimes, ...]

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.overview.plan

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.overview.timeline.seconds

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """What each rank holds at its peak, its process and copies for a moment included."""
        memory = self.overview.memory
        return tuple(
            held.total
            + round((self.ranks[rank].activation_factor - 1) * held.activations)
            + self.ranks[rank].resident_bytes
            + self._copied_bytes(rank)
            for rank, held in sorted(memory.items())
        )

    def _copied_bytes(self, rank: int) -> int:
        """Of what becomes a checkpoint, and of gradients that are being summed."""
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
        """What each rank computes in a step."""
        return self._spent_on(WORK)

    @property
    def transfer_seconds(self) -> tuple[float, ...]:
        """What each rank spends in a step on sending, and on taking in what was sent."""
        return self._spent_on(TRANSFER)

    def _spent_on(self, kind: str) -> tuple[float, ...]:
        events = self.overview.timeline.events
        return tuple(
            sum(each.end - each.start for each in events if (each.rank, each.kind) == (rank, kind))
            for rank in self.plan.ranks
        )

    def shortage(self, limits: Sequence[float] | None) -> float:
        """Bytes that the rank which lacks most lacks; 0 if the plan fits."""
        if limits is None:
            return 0.0
        pairs = zip(self.rank_bytes, limits, strict=True)
        return max(0.0, *(held - limit for held, limit in pairs))


def play(question: Question, plan: Plan, name: str) -> Candidate:
    """Play a step of a plan through; that its schedule is correct is proved where it is used."""
    known = question.known
    pieces = cut(plan, question.batch_size)
    found = played(
        *(plan, pieces, training_step(plan, pieces), known.costs, question.optimizer),
        known.recomputed,
        plan_costs(plan, pieces, known),
        plan.replicated_stages if known.is_synchronised else (),
        remarks=(),
    )
    return Candidate(name, found, known.profile.ranks)


def calibrated(
    question: Question,
    plan: Plan,
    own_seconds: Sequence[float],
    step_seconds: float | None = None,
) -> Question:
    """The question with ranks and network as slow as steps of `plan` showed them to be.

    So a profile follows what time-sharing with other processes costs, which short measurements
    of components do not show.

    Args:
        own_seconds: what each rank took in a step, without waiting for others.
        step_seconds: of the whole step, if the network is to follow what was waited for.
    """
    known, predicted = question.known, play(question, plan, "")
    # A rank that has next to nothing to do shows nothing but what every step takes besides.
    factors = [
        own / each if each > LITTLE * predicted.seconds else 1.0
        for own, each in zip(own_seconds, predicted.own_seconds, strict=True)
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
