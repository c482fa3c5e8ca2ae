"""The modelled device and links of one rank, on a dilated clock.

Transfers and all-reduces end when the modelled ones would, with real small payloads.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain.parallel.exchange import Exchange, Receipt
from hvdtrain.plan.traffic import Operation
from hvdtrain.planner.clusters import DEVICES, Cluster, ClusterNetwork, Event, slowdown
from hvdtrain.planner.network import Network
from hvdtrain.sync.collectives import Collectives
from hvdtrain.world import World


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


class DelayedExchange(Exchange):
    """Transfers that take as long as on modelled links.

    As the cost model of the planner has it: the latency passes from the send on, and the bytes
    move while the receiver waits for them, because MPI makes no progress during computing.

    Args:
        scale: modelled bytes per byte of a message.
    """

    def __init__(
        self, world: World, device: torch.device, hardware: Hardware, scale: float
    ) -> None:
        assert world.communicator is not None, "a single rank transfers nothing"
        self.hardware, self.scale = hardware, scale
        super().__init__(world.communicator, device)

    def now(self) -> float:
        """Return the time at which the modelled device is ready to send."""
        return self.hardware.clock.modelled_now()

    def complete(self, receipts: Sequence[Receipt], start: float) -> None:
        """Return when the messages would have arrived."""
        clock = self.hardware.clock
        start -= clock.late
        super().complete(receipts, start)
        network, rank = self.hardware.network, self.communicator.rank
        moving = 0.0
        for receipt in receipts:
            latency = network.send_seconds(receipt.sender, rank, 1)
            size = self.scale * receipt.rows.nbytes
            moving += network.send_seconds(receipt.sender, rank, size) - latency
            sent = self.sent_at(receipt)
            start = max(start, sent + clock.dilation * latency)
        clock.until(start + clock.dilation * moving)


class Started(NamedTuple):
    """An operation in flight.

    Attributes:
        handle, stamps: of the operation, and of the sum of all members' start times.
        size: bytes of the modelled tensor whose all-reduce takes as long.
    """

    handle: Any
    stamps: Any
    size: float
    flight: Flight


class DelayedCollectives:
    """Collective operations that take as long as on a modelled network.

    The last member's start counts: every operation is followed by the sum of a vector with the
    start time of each member. The operations of a group take place one after another.

    Args:
        collectives: do the real operations.
        ranks: of the group.
        scale: modelled bytes per byte of a tensor.
    """

    def __init__(
        self, collectives: Collectives, ranks: Sequence[int], hardware: Hardware, scale: float
    ) -> None:
        self.collectives, self.ranks = collectives, tuple(ranks)
        self.hardware, self.scale = hardware, scale
        self.size, self.place, self.sent_bytes = collectives.size, collectives.place, 0.0
        self.free_at = 0.0  # real time at which the previous operation ends

    def prepare(self, names: Sequence[str]) -> None:
        """Announce operations."""
        self.collectives.prepare([each for name in names for each in (name, _stamps(name))])

    def all_reduce(self, tensor: Tensor, name: str) -> Started:
        """Start a sum in place."""
        return self._start("all_reduce", tensor, name)

    def all_gather(self, tensor: Tensor, name: str) -> Started:
        """Start to gather the replicas' tensors."""
        return self._start("all_gather", tensor, name)

    def reduce_scatter(self, tensor: Tensor, name: str) -> Started:
        """Start to sum, each replica for its slice."""
        return self._start("reduce_scatter", tensor, name)

    def all_to_all(self, tensor: Tensor, name: str) -> Started:
        """Start to send each replica its slice."""
        return self._start("all_to_all", tensor, name)

    def progress(self) -> None:
        """Let operations in flight continue."""
        self.collectives.progress()

    def wait(self, handle: Started) -> Tensor:
        """Return the result of an operation when the modelled one would have ended."""
        clock = self.hardware.clock
        waiting_since = clock.modelled_now()
        starts = self.collectives.wait(handle.stamps)
        result = self.collectives.wait(handle.handle)
        start = max(self.free_at, float(starts.max()))
        seconds = self.hardware.reduce_seconds(self.ranks, handle.size)
        self.free_at = self.hardware.end_of(start, seconds, waiting_since)
        self.hardware.flights.remove(handle.flight)
        clock.until(self.free_at)
        return result

    def _start(self, kind: Any, tensor: Tensor, name: str) -> Started:
        operation = Operation(kind, round(self.scale * tensor.nbytes))
        self.sent_bytes += operation.sent_bytes(self.size)
        size = operation.as_all_reduce(self.size)
        now = self.hardware.clock.modelled_now()
        flights = self.hardware.flights
        start = max([now, *(flight.start + flight.seconds for flight in flights)])
        flight = Flight(start, self.hardware.reduce_seconds(self.ranks, size))
        handle = getattr(self.collectives, kind)(tensor, name)
        stamps = torch.zeros(self.size, dtype=torch.float64)
        stamps[self.place] = now
        flights.append(flight)
        return Started(handle, self.collectives.all_reduce(stamps, _stamps(name)), size, flight)


def _stamps(name: str) -> str:
    return f"{name}.start"
