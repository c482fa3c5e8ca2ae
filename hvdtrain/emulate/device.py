"""The modelled device and links of one rank, on a dilated clock."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from hvdtrain.planner.clusters import DEVICES, Cluster, ClusterNetwork, Event, slowdown
from hvdtrain.planner.network import Network


class Clock:
    """Lets modelled seconds pass by sleeping.

    A sleep ends late: the timer is not exact, and the cores may be busy with other ranks. What
    follows is shortened by the same time, so that such delays do not add up.

    Args:
        dilation: real seconds per modelled second.
        now: returns real seconds.
        sleep: lets real seconds pass.

    Attributes:
        slept: real seconds of `work` so far.
        late: real seconds by which this rank is behind the modelled device.
    """

    def __init__(
        self,
        dilation: float,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.dilation, self.now, self._sleep = dilation, now, sleep
        self.slept = self.late = 0.0

    def modelled_now(self) -> float:
        """Return the real time at which the modelled device has reached this point."""
        return self.now() - self.late

    def until(self, deadline: float) -> None:
        """Sleep until a real time, if the modelled device reaches it later than now."""
        if self.modelled_now() >= deadline:
            return
        left = deadline - self.now()
        if left > 0:
            self._sleep(left)
        self.late = max(0.0, self.now() - deadline)

    def work(self, seconds: float) -> None:
        """Let modelled seconds pass."""
        self.until(self.modelled_now() + self.dilation * seconds)
        self.slept += self.dilation * seconds


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
