"""Seconds of the parts of a step, from marks in the queue of a device that it has reached.

A GPU computes later than the host asks it to: between two times of the host lies the time of
asking. Between two marks lies what the device did, and where the host let it wait.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hvdtrain.device import Mark  # loads PyTorch


class Wait(NamedTuple):
    """A wait for other ranks.

    The device computes nothing between its start and its end.

    Attributes:
        arrived: when all that it waited for was in memory of the host.
        transfer: seconds of the host's wait in which all of it had been sent already.
    """

    start: "Mark"
    arrived: "Mark"
    end: "Mark"
    transfer: float


class Reduction(NamedTuple):
    """The gradient reductions of a stage: their start, and start and end of the wait for them."""

    start: "Mark"
    waiting: "Mark"
    end: "Mark"


class Act(NamedTuple):
    """An action of a kind, with the waits and reductions within it."""

    kind: str
    start: "Mark"
    end: "Mark"
    waits: list[Wait]
    reductions: list[Reduction]

    @property
    def waited(self) -> float:
        """Seconds in which it waited for other ranks."""
        return sum(wait.end - wait.start for wait in self.waits) + sum(
            reduction.end - reduction.waiting for reduction in self.reductions
        )


@dataclass
class StepSeconds:
    """Seconds of the parts of a step on one rank.

    Attributes:
        spent: by kind of action, without waiting.
        reduction: while a reduction is in flight.
        exposed: waiting for reductions.
        bubble: waiting for what was not sent yet.
        transfer: waiting for what was under way.
    """

    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    reduction: float = 0.0
    exposed: float = 0.0
    bubble: float = 0.0
    transfer: float = 0.0


@dataclass
class StepMarks:
    """The marks of one step of one rank."""

    acts: list[Act] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)

    def seconds(self) -> StepSeconds:
        """Return where the time went; the device must have done the step."""
        total = StepSeconds()
        for act in self.acts:
            total.spent[act.kind] += act.end - act.start - act.waited
        for wait in self.waits:
            waited = wait.arrived - wait.start  # the end of the host's wait, which starts earlier
            transfer = min(wait.transfer, waited)
            total.transfer += transfer + (wait.end - wait.arrived)
            total.bubble += waited - transfer
        for reduction in self.reductions:
            total.reduction += reduction.end - reduction.start
            total.exposed += reduction.end - reduction.waiting
        return total
