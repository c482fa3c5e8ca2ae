"""Measures the network of a job: all-reduces, transfers, and both while ranks compute."""

import math
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from hvdtrain.device import read_later, stage_in, stage_out, synchronize
from hvdtrain.host.process import wait_until
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.planner.network import Contention, Curve, MeasuredNetwork
from hvdtrain.sync.collectives import Collectives
from hvdtrain.world import World

SIZES = tuple(4**power for power in range(1, 14))  # 4 bytes to 64 MiB
# Bytes of an all-reduce that Horovod does not combine with others in its buffer of 128 MiB.
# Training has no such buffer, so that it must not count as memory of the process.
UNFUSED = 72 * 2**20
WARM_UP = 2
LEAST, MOST = 5, 40  # repeats per size
SECONDS_PER_SIZE = 0.05
LONG_SECONDS = 0.25  # an operation that takes longer, as on a slow link, is not repeated often
CONTENDED_BYTES = 4 * 2**20
NOT_OVER = 0.02  # part of the seconds of all-reduces that tells that they ran to the end
MOST_SLOWDOWN = 8.0
LINK_SIZES = (2**10, 2**16, 2**20)
PING, PONG = 11, 12
_CPU = torch.device("cpu")
# Starts an all-reduce in place under a name; returns a function that tells whether it is complete.
Start = Callable[[torch.Tensor, str], Callable[[], bool]]


def sizes_up_to(largest: float) -> tuple[int, ...]:
    """Return the sizes in bytes to measure up to `largest`, and one that is at least as large."""
    below = [size for size in SIZES if size < largest]
    above = [size for size in SIZES if size >= largest]
    return tuple(below + above[:1])


def mpi_sum(communicator: Any) -> Start:
    """Return a function that runs MPI's own all-reduce over the ranks of a communicator.

    It is the blocking all-reduce, which Horovod calls. The one that does not block uses other
    algorithms, which no tuning changes.
    """

    def start(tensor: torch.Tensor, name: str) -> Callable[[], bool]:
        host = stage_out(tensor)
        communicator.Allreduce(host.numpy(), np.empty_like(host.numpy()))
        stage_in(host, tensor)
        return lambda: True

    return start


def multiplying(device: torch.device = _CPU) -> Callable[[], object]:
    """Return a function that multiplies two small matrices, and waits until a device has."""
    matrix = torch.ones(192, 192, device=device)

    def work() -> None:
        torch.mm(matrix, matrix)
        read_later((), device)()  # not for the sums, which have a stream of their own

    return work


@dataclass(frozen=True)
class Tools:
    """Operations whose times are measured.

    Attributes:
        start: starts the all-reduces of training, over all ranks.
        group_sum: returns a function that starts all-reduces over the ranks of a communicator.
        work: computes for a short time.
        device: of the gradients that training sums.
        clock: returns seconds; that of modelled links counts no delays of this machine's cores.
        contention: of modelled links, which real small sums do not show; None: to be measured.
    """

    start: Start
    group_sum: Callable[[Any], Start] = mpi_sum
    work: Callable[[], object] = field(default_factory=multiplying)
    device: torch.device = _CPU
    clock: Callable[[], float] = time.perf_counter
    contention: Contention | None = None

    def now(self) -> float:
        """Return the clock in seconds after the device has done all its work."""
        synchronize(self.device)
        return self.clock()


def measure_network(
    world: World, tools: Tools, exchange: Exchange, reduced_bytes: float, transfer_bytes: float
) -> MeasuredNetwork:
    """Measure the network of the job. Collective.

    Args:
        tools: what is measured.
        reduced_bytes, transfer_bytes: the largest all-reduce and transfer that matter.
    """
    hosts = tuple(world.gather(socket.gethostname()))
    sizes = sizes_up_to(reduced_bytes)
    whole = reduce_curve(world, tools, sizes)
    all_reduce: dict[bool, dict[int, Curve]] = {}
    everyone = tuple(range(world.size))
    all_reduce.setdefault(_crosses(hosts, everyone), {})[world.size] = whole
    if world.size > 2:
        _add_smaller_groups(world, tools, hosts, sizes, whole, all_reduce)
    hand_over = transfer_curves(world, exchange, sizes_up_to(transfer_bytes))
    contention = tools.contention or measure_contention(world, tools, whole)
    return MeasuredNetwork(hosts, all_reduce, hand_over, contention)


def horovod_sum(horovod: Any) -> Start:
    """Return a function that starts Horovod's all-reduce over all ranks."""

    def start(tensor: torch.Tensor, name: str) -> Callable[[], bool]:
        handle = horovod.allreduce_async_(tensor, name=name, op=horovod.Sum)

        def is_over() -> bool:
            if not horovod.poll(handle):
                return False
            horovod.synchronize(handle)
            return True

        return is_over

    return start


def started_sum(collectives: Collectives) -> Start:
    """Return a function that starts all-reduces as training does."""

    def start(tensor: torch.Tensor, _: str) -> Callable[[], bool]:
        handle = collectives.all_reduce(tensor, "probe")

        def is_over() -> bool:
            if not handle.is_over():
                return False
            collectives.wait(handle)  # copies the sum to the device
            return True

        return is_over

    return start


def reduce_curve(world: World, tools: Tools, sizes: Sequence[int]) -> Curve:
    """Return the seconds of an all-reduce of fp32 over all calling ranks, by bytes. Collective."""
    return Curve.of(sizes, [_sum_seconds(world, tools, size) for size in sizes])


def _sum_seconds(world: World, tools: Tools, size: int) -> float:
    values = torch.zeros(max(1, size // 4), device=tools.device)

    def once() -> float:
        began = tools.now()
        wait_until(tools.start(values, f"probe.{size}"))
        return tools.now() - began

    return _agreed_median(world, once)


def _agreed_median(world: World, once: Callable[[], float]) -> float:
    """Return the median seconds of the slowest rank. Collective.

    All ranks make the same number of repeats, as many as fit into SECONDS_PER_SIZE. There is no
    barrier between repeats: in training ranks do not arrive at the same time either.
    """
    # The first call opens connections.
    longest = float(min([max(world.gather(once())) for _ in range(WARM_UP)]))
    if longest > LONG_SECONDS:
        return longest
    repeats = int(min(MOST, max(LEAST, SECONDS_PER_SIZE / max(longest, 1e-9))))
    repeated = [once() for _ in range(repeats)]
    return float(max(world.gather(statistics.median(repeated))))


def _add_smaller_groups(
    world: World,
    tools: Tools,
    hosts: Sequence[str],
    sizes: Sequence[int],
    whole: Curve,
    all_reduce: dict[bool, dict[int, Curve]],
) -> None:
    """Measure groups of 2, 4, ... ranks by blocking MPI, and correct them for training's sums.

    Horovod needs its groups when it starts.
    """
    assert world.communicator is not None
    blocking = replace(tools, start=tools.group_sum(world.communicator))
    mpi_curve = reduce_curve(world, blocking, sizes)
    count = 2
    while count < world.size:
        group = tuple(range(count))
        inside = world.rank in group
        part = world.communicator.Split(0 if inside else 1, world.rank)
        seconds = [0.0] * len(sizes)
        if inside:
            alone = World("none", part.rank, part.size, part.rank, part.size, 1, part)
            blocking = replace(tools, start=tools.group_sum(part))
            seconds = [_sum_seconds(alone, blocking, size) for size in sizes]
        seconds = world.broadcast(seconds)
        part.Free()
        corrected = [
            of_training(measured, mpi_curve(size), whole(size))
            for measured, size in zip(seconds, sizes, strict=True)
        ]
        curve = Curve.of(sizes, corrected)
        all_reduce.setdefault(_crosses(hosts, group), {})[count] = curve
        count *= 2


def of_training(group: float, everyone: float, whole: float) -> float:
    """Return the seconds of training's sum over a group.

    What it takes longer than MPI's is an overhead, which does not depend on the number of ranks.
    Where it is faster, as NCCL is than copies to the host, it is as many times faster in a group.

    Args:
        group: seconds of MPI's sum over the group.
        everyone: of MPI's sum over all ranks.
        whole: of training's sum over all ranks.
    """
    return group + whole - everyone if whole >= everyone else group * whole / everyone


def _crosses(hosts: Sequence[str], ranks: Sequence[int]) -> bool:
    return len({hosts[rank] for rank in ranks}) > 1


def _pairs(hosts: Sequence[str]) -> dict[bool, tuple[int, int]]:
    """Return a pair of ranks on one host and a pair on two hosts, if they exist."""
    pairs: dict[bool, tuple[int, int]] = {}
    for first in range(len(hosts)):
        for second in range(first + 1, len(hosts)):
            pairs.setdefault(hosts[first] != hosts[second], (first, second))
    return pairs


def transfer_curves(world: World, exchange: Exchange, sizes: Sequence[int]) -> dict[bool, Curve]:
    """Measure transfers on one host, and between two hosts if there are several. Collective."""
    pairs = _pairs(world.gather(socket.gethostname()))
    return {
        crosses: _transfer_curve(world, exchange, pair, sizes) for crosses, pair in pairs.items()
    }


def _transfer_curve(
    world: World, exchange: Exchange, pair: tuple[int, int], sizes: Sequence[int]
) -> Curve:
    """Return the seconds from a send to its arrival by bytes: half of a round trip. Collective."""
    seconds_by_size: list[float] = []
    for number, size in enumerate(sizes):
        warm_up, repeats = WARM_UP, int(min(MOST, max(LEAST, 2**22 / size)))
        if number > 1:
            curve = Curve.of(sizes[:number], seconds_by_size)
            if 2 * curve(size) > LONG_SECONDS:
                warm_up, repeats = 0, 1
        world.barrier()
        seconds = 0.0
        if world.rank in pair:
            is_first = world.rank == pair[0]
            other = pair[1] if is_first else pair[0]
            trips = _trip_seconds(exchange, other, is_first, size, warm_up + repeats)
            seconds = statistics.median(trips[warm_up:])
        seconds_by_size.append(world.broadcast(seconds, pair[0]))
    return Curve.of(sizes, seconds_by_size)


def link_curves(world: World, exchange: Exchange, largest: float) -> dict[tuple[int, int], Curve]:
    """Measure transfers between each two hosts, or each two ranks of one host. Collective.

    Hosts, or ranks, that are measured at the same time share no link: they meet as in the rounds
    of a tournament.

    Args:
        largest: bytes of a transfer that matter.

    Returns:
        The curve of each pair of ranks in ascending order, on several hosts of those whose hosts
        differ; the same on all ranks.
    """
    hosts = world.gather(socket.gethostname())
    several = len(set(hosts)) > 1
    members = [
        [rank for rank, host in enumerate(hosts) if host == one] for one in dict.fromkeys(hosts)
    ]
    players = [ranks[0] for ranks in members] if several else list(range(world.size))
    sizes = [size for size in LINK_SIZES if size <= largest] or [LINK_SIZES[0]]
    measured: dict[tuple[int, int], Curve] = {}
    for pairs in rounds_of(len(players)):
        world.barrier()
        for first, second in ((players[a], players[b]) for a, b in pairs):
            if world.rank in (first, second):
                other = second if world.rank == first else first
                seconds = [
                    statistics.median(
                        _trip_seconds(exchange, other, other == second, size, WARM_UP + LEAST)[
                            WARM_UP:
                        ]
                    )
                    for size in sizes
                ]
                measured[first, second] = Curve.of(sizes, seconds)
    exchange.waits.clear()
    found = dict(pair for one in world.gather(measured) for pair in one.items())
    if not several:
        return found
    place = {ranks[0]: ranks for ranks in members}
    return {
        (min(one, other), max(one, other)): curve
        for (first, second), curve in found.items()
        for one in place[first]
        for other in place[second]
    }


def rounds_of(players: int) -> list[list[tuple[int, int]]]:
    """Return rounds in which each two players meet once, and none is in two pairs of a round."""
    places = players + players % 2  # with a place that nobody has, if their number is odd
    rounds = []
    for turn in range(places - 1):
        pairs = set()
        for one in range(places - 1):
            other = (turn - one) % (places - 1)
            other = places - 1 if other == one else other  # the last place meets one who is left
            pairs.add((min(one, other), max(one, other)))
        rounds.append(sorted(pair for pair in pairs if pair[1] < players))
    return rounds


def broadcast_curve(world: World, sizes: Sequence[int]) -> Curve:
    """Return the seconds until all ranks have rank 0's data, by bytes. Collective."""
    return Curve.of(sizes, [_broadcast_seconds(world, size) for size in sizes])


def _broadcast_seconds(world: World, size: int) -> float:
    values = np.zeros(size, np.uint8)
    communicator = world.communicator
    assert communicator is not None

    def once() -> float:
        world.barrier()  # otherwise rank 0 would be several repeats ahead
        began = time.perf_counter()
        communicator.Bcast(values)
        return time.perf_counter() - began

    return _agreed_median(world, once)


def _trip_seconds(
    exchange: Exchange, other: int, is_first: bool, size: int, repeats: int
) -> list[float]:
    """Return half of the seconds of each of some round trips."""
    sent = torch.ones(size, dtype=torch.uint8, device=exchange.device)
    target = torch.empty_like(sent)
    seconds = []
    for _ in range(repeats):
        began = exchange.now()
        receipt = exchange.receive(target, other, PONG if is_first else PING)
        if is_first:
            exchange.send(sent, other, PING)
        exchange.wait([receipt])
        if not is_first:
            exchange.send(sent, other, PONG)
        exchange.flush()
        seconds.append((exchange.now() - began) / 2)
    return seconds


def message_to_self(exchange: Exchange) -> None:
    """Send one byte to this rank: the overhead of every transfer on each of its two ranks."""
    sent = torch.ones(1, dtype=torch.uint8, device=exchange.device)
    rank = exchange.communicator.rank
    receipt = exchange.receive(torch.empty_like(sent), rank, PING)
    exchange.send(sent, rank, PING)
    exchange.wait([receipt])
    exchange.flush()


def measure_contention(
    world: World, tools: Tools, alone: Curve, size: int = CONTENDED_BYTES
) -> Contention:
    """Return how much slower computing and an all-reduce are at the same time. Collective.

    Args:
        alone: seconds of an all-reduce alone, by bytes.
    """
    values = torch.zeros(size // 4, device=tools.device)
    one = statistics.median([_seconds_of_work(tools) for _ in range(30)])
    expected = alone(size)
    ratios: list[tuple[float, float]] = []
    for _ in range(WARM_UP + LEAST):
        world.barrier()
        began = tools.now()
        is_over = tools.start(values, "probe.contention")
        products = 0
        while not is_over():
            tools.work()
            products += 1
        seconds = tools.now() - began
        ratios.append((seconds / max(one * products, 1e-9), seconds / expected))
    kept = ratios[WARM_UP:]
    compute = statistics.median(ratio for ratio, _ in kept)
    reduce = statistics.median(ratio for _, ratio in kept)
    slowest = np.max(world.gather((compute, reduce)), axis=0)
    return Contention(*(float(np.clip(ratio, 1.0, MOST_SLOWDOWN)) for ratio in slowest))


@dataclass
class Disturbance:
    """Starts all-reduces over all ranks beside a computation, one after another.

    Several in flight may have one tensor, which Horovod allows.

    Attributes:
        start: starts Horovod's all-reduces.
        device: of the tensors.
        alone: seconds of an all-reduce alone, by bytes.
        overlaps: by computation: its seconds, and how many seconds' worth of all-reduces, as they
            take alone, were done meanwhile.
    """

    start: Start
    device: torch.device
    alone: Callable[[float], float]
    overlaps: list[tuple[float, float]] = field(default_factory=list)

    def __call__(self, seconds: float) -> Callable[[], None]:
        """Start all-reduces that take these seconds alone; return a function that waits for them.

        All ranks call it with the same seconds, and call the result when they have computed.
        """
        size = next((one for one in SIZES if self.alone(one) >= seconds), UNFUSED)
        number = max(1, math.ceil(seconds / self.alone(size)))
        values, began = torch.ones(size // 4, device=self.device), time.perf_counter()
        started = [self.start(values, f"probe.{k}.{size}") for k in range(number)]

        def wait() -> None:
            computed = time.perf_counter()
            for is_over in started:
                wait_until(is_over)
            left = time.perf_counter() - computed
            done = number * self.alone(size) - left
            if left > NOT_OVER * seconds and done > 0:
                self.overlaps.append((computed - began, done))

        return wait

    def slowdown(self) -> float | None:
        """Return how much slower an all-reduce is beside a computation; None if none tells."""
        if not self.overlaps:
            return None
        computed, done = map(sum, zip(*self.overlaps, strict=True))
        return float(np.clip(computed / done, 1.0, MOST_SLOWDOWN))


def _seconds_of_work(tools: Tools) -> float:
    began = tools.now()
    tools.work()
    return tools.now() - began
