"""Measures the network between the ranks of a job: sums, hand-overs, and both beside computing."""

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.parallel.exchange import Exchange
from hvdtrain.planner.curve import Curve
from hvdtrain.planner.network import Contention, MeasuredNetwork
from hvdtrain.poll import wait_until
from hvdtrain.world import World

SIZES = tuple(4**power for power in range(1, 14))  # 4 bytes to 64 MiB
WARM_UP = 2
LEAST, MOST = 5, 40  # repeats of a size
SECONDS_A_SIZE = 0.05
CONTENDED_BYTES = 4 * 2**20
PING, PONG = 11, 12


def sizes_up_to(largest: float) -> tuple[int, ...]:
    """The sizes to measure where none is larger than that: in bytes, one above it included."""
    below = [size for size in SIZES if size < largest]
    above = [size for size in SIZES if size >= largest]
    return tuple(below + above[:1])


def measure_network(
    here: World, horovod: Any, exchange: Exchange, reduced_bytes: float, handed_bytes: float
) -> MeasuredNetwork:
    """What the network takes. Collective.

    Args:
        horovod: its module, started.
        reduced_bytes, handed_bytes: the largest of a sum, and of a hand-over, that matter.
    """
    hosts = tuple(here.gather(socket.gethostname()))
    sizes = sizes_up_to(reduced_bytes)
    whole = reduce_curve(here, horovod_sum(horovod), sizes)
    all_reduce: dict[bool, dict[int, Curve]] = {}
    everyone = tuple(range(here.size))
    all_reduce.setdefault(_crosses(hosts, everyone), {})[here.size] = whole
    if here.size > 2:
        _add_smaller_groups(here, hosts, sizes, whole, all_reduce)
    hand_over = hand_over_curves(here, exchange, sizes_up_to(handed_bytes))
    contention = measure_contention(here, horovod_sum(horovod), whole)
    return MeasuredNetwork(hosts, all_reduce, hand_over, contention)


# Starts a sum in place, under a name; what it gives tells whether the sum is over.
Start = Callable[[torch.Tensor, str], Callable[[], bool]]


def horovod_sum(horovod: Any) -> Start:
    """Horovod's sum over all ranks, started: what is given asks whether it is over."""

    def start(tensor: torch.Tensor, name: str) -> Callable[[], bool]:
        handle = horovod.allreduce_async_(tensor, name=name, op=horovod.Sum)

        def is_over() -> bool:
            if not horovod.poll(handle):
                return False
            horovod.synchronize(handle)
            return True

        return is_over

    return start


def mpi_sum(communicator: Any) -> Start:
    """MPI's own sum over the ranks of a communicator: the blocking one, which Horovod calls.

    What does not block takes other algorithms, which no tuning reaches.
    """

    def start(tensor: torch.Tensor, name: str) -> Callable[[], bool]:
        communicator.Allreduce(tensor.numpy(), np.empty_like(tensor.numpy()))
        return lambda: True

    return start


def reduce_curve(here: World, start: Start, sizes: Sequence[int]) -> Curve:
    """Seconds of a sum of fp32 over all ranks that call this, by bytes. Collective."""
    return Curve.of(sizes, [_sum_seconds(here, start, size) for size in sizes])


def _sum_seconds(here: World, start: Start, size: int) -> float:
    values = torch.zeros(max(1, size // 4))

    def once() -> float:
        began = time.perf_counter()
        wait_until(start(values, f"probe.{size}"))
        return time.perf_counter() - began

    return _agreed_median(here, once)


def _agreed_median(here: World, once: Callable[[], float]) -> float:
    """Of as many repeats as fit into a moment, the same number on all ranks; of the slowest rank.

    Between repeats nobody waits: as in training, where ranks come one after another.
    """
    for _ in range(WARM_UP):
        seconds = once()
    longest = max(here.gather(seconds))
    repeats = int(min(MOST, max(LEAST, SECONDS_A_SIZE / max(longest, 1e-9))))
    found = [once() for _ in range(repeats)]
    return float(max(here.gather(statistics.median(found))))


def _add_smaller_groups(
    here: World,
    hosts: Sequence[str],
    sizes: Sequence[int],
    whole: Curve,
    all_reduce: dict[bool, dict[int, Curve]],
) -> None:
    """Groups of 2, 4, ... ranks, by MPI itself, and what Horovod adds to it on all ranks.

    Horovod has to be told its groups when it starts; nothing but the number of ranks differs.
    """
    assert here.communicator is not None
    own = reduce_curve(here, mpi_sum(here.communicator), sizes)
    more = [max(0.0, whole(size) - own(size)) for size in sizes]
    count = 2
    while count < here.size:
        group = tuple(range(count))
        inside = here.rank in group
        part = here.communicator.Split(0 if inside else 1, here.rank)
        seconds = [0.0] * len(sizes)
        if inside:
            alone = World("none", part.rank, part.size, part.rank, part.size, 1, part)
            seconds = [_sum_seconds(alone, mpi_sum(part), size) for size in sizes]
        seconds = here.broadcast(seconds)
        part.Free()
        curve = Curve.of(sizes, [a + b for a, b in zip(seconds, more, strict=True)])
        all_reduce.setdefault(_crosses(hosts, group), {})[count] = curve
        count *= 2


def _crosses(hosts: Sequence[str], ranks: Sequence[int]) -> bool:
    return len({hosts[rank] for rank in ranks}) > 1


def _pairs(hosts: Sequence[str]) -> dict[bool, tuple[int, int]]:
    """A pair of ranks on one host, and one on two, where there are such."""
    found: dict[bool, tuple[int, int]] = {}
    for first in range(len(hosts)):
        for second in range(first + 1, len(hosts)):
            found.setdefault(hosts[first] != hosts[second], (first, second))
    return found


def hand_over_curves(here: World, exchange: Exchange, sizes: Sequence[int]) -> dict[bool, Curve]:
    """Of a pair of ranks on one host, and of one on two hosts, where there are. Collective."""
    pairs = _pairs(here.gather(socket.gethostname()))
    return {
        crosses: _hand_over_curve(here, exchange, pair, sizes) for crosses, pair in pairs.items()
    }


def _hand_over_curve(
    here: World, exchange: Exchange, pair: tuple[int, int], sizes: Sequence[int]
) -> Curve:
    """Seconds from a send to the arrival, by bytes: half of a round trip. Collective."""
    found = []
    for size in sizes:
        here.barrier()
        seconds = 0.0
        if here.rank in pair:
            other = pair[1] if here.rank == pair[0] else pair[0]
            seconds = _trip_seconds(exchange, other, here.rank == pair[0], size)
        found.append(here.broadcast(seconds, pair[0]))
    return Curve.of(sizes, found)


def broadcast_curve(here: World, sizes: Sequence[int]) -> Curve:
    """Seconds until all ranks have what rank 0 had, by bytes. Collective."""
    return Curve.of(sizes, [_broadcast_seconds(here, size) for size in sizes])


def _broadcast_seconds(here: World, size: int) -> float:
    values = np.zeros(size, np.uint8)
    communicator = here.communicator
    assert communicator is not None

    def once() -> float:
        here.barrier()  # or rank 0 would be ahead by many
        began = time.perf_counter()
        communicator.Bcast(values)
        return time.perf_counter() - began

    return _agreed_median(here, once)


def _trip_seconds(exchange: Exchange, other: int, begins: bool, size: int) -> float:
    sent = torch.ones(size, dtype=torch.uint8, device=exchange.device)
    target = torch.empty_like(sent)
    repeats = int(min(MOST, max(LEAST, 2**22 / size)))
    found = []
    for _ in range(WARM_UP + repeats):
        began = time.perf_counter()
        receipt = exchange.receive(target, other, PONG if begins else PING)
        if begins:
            exchange.send(sent, other, PING)
        exchange.wait([receipt])
        if not begins:
            exchange.send(sent, other, PONG)
        exchange.flush()
        found.append((time.perf_counter() - began) / 2)
    return statistics.median(found[WARM_UP:])


def message_to_oneself(exchange: Exchange) -> None:
    """What every hand-over takes on both of its ranks: posting, sending and taking in."""
    sent = torch.ones(1, dtype=torch.uint8, device=exchange.device)
    rank = exchange.communicator.rank
    receipt = exchange.receive(torch.empty_like(sent), rank, PING)
    exchange.send(sent, rank, PING)
    exchange.wait([receipt])
    exchange.flush()


def measure_contention(
    here: World,
    start: Start,
    alone: Curve,
    size: int = CONTENDED_BYTES,
) -> Contention:
    """How much slower computing and a sum are beside each other. Collective."""
    matrix = torch.ones(192, 192)
    values = torch.zeros(size // 4)
    one = statistics.median([_seconds_of(lambda: matrix @ matrix) for _ in range(30)])
    expected = alone(size)
    ratios: list[tuple[float, float]] = []
    for _ in range(WARM_UP + LEAST):
        here.barrier()
        began = time.perf_counter()
        is_over = start(values, "probe.contention")
        products = 0
        while not is_over():
            matrix @ matrix
            products += 1
        seconds = time.perf_counter() - began
        ratios.append((seconds / max(one * products, 1e-9), seconds / expected))
    kept = ratios[WARM_UP:]
    compute = statistics.median(ratio for ratio, _ in kept)
    reduce = statistics.median(ratio for _, ratio in kept)
    slowest = np.max(here.gather((compute, reduce)), axis=0)
    return Contention(*(float(np.clip(each, 1.0, 8.0)) for each in slowest))


def _seconds_of(once: Callable[[], object]) -> float:
    began = time.perf_counter()
    once()
    return time.perf_counter() - began
