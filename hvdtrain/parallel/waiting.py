"""The time of a step in which a rank did not compute, by cause."""

from dataclasses import dataclass


@dataclass
class ReductionTime:
    """Seconds of the gradient reductions of a step.

    Attributes:
        total: while a reduction is in flight.
        exposed: while the rank waits for reductions and computes nothing.
    """

    total: float = 0.0
    exposed: float = 0.0

    def add(self, other: "ReductionTime") -> None:
        """Add the times of another reduction."""
        self.total += other.total
        self.exposed += other.exposed


@dataclass
class WaitTime:
    """Seconds in which a rank waited for others, without gradient reductions.

    Attributes:
        bubble: while the awaited data was not sent yet.
        transfer: while sent data was in transfer, or this rank's sends or collectives were not
            complete.
    """

    bubble: float = 0.0
    transfer: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of both."""
        return self.bubble + self.transfer
