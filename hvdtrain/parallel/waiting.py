"""The time of a step in which a rank did not compute, by what it waited for."""

from dataclasses import dataclass


@dataclass
class ReductionTime:
    """Seconds of the reductions of a step: in flight at all, and with nothing to compute."""

    total: float = 0.0
    exposed: float = 0.0

    def add(self, other: "ReductionTime") -> None:
        """Count another reduction."""
        self.total += other.total
        self.exposed += other.exposed


@dataclass
class WaitTime:
    """Seconds in which a rank waited for others, reductions apart.

    Attributes:
        bubble: what it waited for had not been sent yet.
        transfer: it had been, or this rank's own sends or collectives were not through.
    """

    bubble: float = 0.0
    transfer: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.bubble + self.transfer
