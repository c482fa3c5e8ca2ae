"""The modelled device and links of one rank, on a dilated clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from hvdtrain.emulate.clock import Clock
from hvdtrain.planner.clusters import Cluster, ClusterNetwork
from hvdtrain.planner.events import DEVICES, Event, slowdown
from hvdtrain.planner.network import Network


@dataclass
class Flight:
    """An all-reduce in flight, as far as this rank knows: it may start later on other ranks.

    Attributes:
        start: real time at which this rank started it, or the one before it ends.
        seconds: real seconds that it takes alone.
    """

    start: float
    seconds: float


@dataclass
class Hardware:
    """The modelled device and links of a rank.

    Attributes:
        network_in: returns the network in a step.
        step: returns the number of the current step, for events.
        flights: the all-reduces in flight.
    """

    network_in: Callable[[int], Network]
    rank: int
    clock: Clock
    events: Sequence[Event] = ()
    step: Callable[[], int] = lambda: 1
    flights: list[Flight] = field(default_factory=list)

    @classmethod
    def of_cluster(cls, cluster: Cluster, rank: int, clock: Clock) -> "Hardware":
        """Return the hardware of a rank of a cluster."""
        return cls(partial(ClusterNetwork, cluster), rank, clock, cluster.events)

    @property
    def network(self) -> Network:
        """The network in the current step."""
        return self.network_in(self.step())

    def compute(self, seconds: float, contention: float | None = None) -> None:
        """Let a computation of `seconds` on an undisturbed device pass.

        It is slower in events, and while all-reduces are in flight.

        Args:
            contention: its slowdown beside an all-reduce; None for that of the network.
        """
        slow = slowdown(self.events, DEVICES, [self.rank], self.step())
        alone, start = slow * seconds * self.clock.dilation, self.clock.modelled_now()
        compute, reduce = self.network.contention
        compute = compute if contention is None else contention
        if compute > 1:
            for flight in self.flights:
                end = flight.start + flight.seconds * reduce
                overlap = min(max(0.0, end - max(start, flight.start)), alone * compute)
                alone += overlap * (1 - 1 / compute)
        self.clock.work(alone / self.clock.dilation)

    def reduce_seconds(self, ranks: Sequence[int], size: float) -> float:
        """Return the real seconds of an all-reduce of modelled bytes alone."""
        return self.clock.dilation * self.network.reduce_seconds(ranks, size)

    def end_of(self, start: float, seconds: float, waiting_since: float) -> float:
        """Return the real time at which an all-reduce ends.

        It is slower while this rank computes, which it does until it waits.

        Args:
            start: when its last member started it.
            seconds: real seconds that it takes alone.
        """
        _, reduce = self.network.contention
        overlap = min(max(0.0, waiting_since - start), seconds * reduce)
        return start + overlap + seconds - overlap / reduce
