"""Transfers and all-reduces of an emulation: real payloads at the times of modelled ones."""

import time
from dataclasses import replace

import pytest
import torch

from hvdtrain.emulate import Clock, DelayedCollectives, DelayedExchange, Hardware
from hvdtrain.planner.clusters import LINKS, PRESETS, Event
from hvdtrain.planner.network import MeasuredNetwork
from hvdtrain.planner.probe import LINK_SIZES, link_curves, transfer_curves
from hvdtrain.sync.collectives import MPICollectives
from hvdtrain.world import World, communicator_among

pytestmark = pytest.mark.several_ranks
SCALE, ROWS, DILATION = 1024, 1024, 10.0
SIZE = SCALE * 4 * ROWS  # modelled bytes of a message


def hardware_of(world: World, gbytes: float, sleeps: list[float] | None = None) -> Hardware:
    """Return modelled hardware; what its clock sleeps is added to `sleeps`, in seconds."""

    def sleep(seconds: float) -> None:
        if sleeps is not None:
            sleeps.append(seconds)
        time.sleep(seconds)

    alone = replace(
        PRESETS["8-v100"], ranks=world.size, gbytes=gbytes, latency_microseconds=1000.0
    )
    return Hardware.of_cluster(alone, world.rank, Clock(DILATION, sleep=sleep))


def sent_around(
    world: World, gbytes: float, sleeps: list[float] | None = None
) -> tuple[torch.Tensor, float, float]:
    """Send a message to the next rank.

    Returns:
        The received one, the seconds of the wait, and those that the model predicts.
    """
    hardware = hardware_of(world, gbytes, sleeps)
    exchange = DelayedExchange(world, torch.device("cpu"), hardware, SCALE)
    received = torch.empty(ROWS)
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    world.barrier()
    receipt = exchange.receive(received, before, 7)
    exchange.send(torch.full((ROWS,), float(world.rank)), after, 7)
    start = time.perf_counter()
    exchange.wait([receipt])
    seconds = time.perf_counter() - start
    exchange.flush()
    return received, seconds, DILATION * hardware.network.send_seconds(before, world.rank, SIZE)


def test_a_message_takes_as_long_as_on_the_modelled_link(world: World) -> None:
    received, seconds, predicted = sent_around(world, gbytes=0.5)
    assert predicted > 0.09
    # The latency may have started to pass before the wait, when the other rank sent.
    assert 0.09 - DILATION * 1e-3 < seconds - 1e-4 < 20 * predicted
    assert received.eq((world.rank - 1) % world.size).all()


def test_a_message_on_a_fast_link_is_not_delayed(world: World) -> None:
    # What the clock sleeps counts, not what a busy machine takes for the message itself.
    sleeps: list[float] = []
    _, _, predicted = sent_around(world, 1e6, sleeps)
    assert sum(sleeps) <= predicted < 0.011


def summed(
    world: World, gbytes: float, lag: float = 0.0, sleeps: list[float] | None = None
) -> tuple[torch.Tensor, float, float]:
    """Sum a tensor over all ranks; the last one starts late.

    Returns:
        The sum, the seconds from the start of the first rank, and those of the model alone.
    """
    everybody, hardware = tuple(range(world.size)), hardware_of(world, gbytes, sleeps)
    communicator_among(everybody)
    real = MPICollectives(everybody, world.rank, f"emulated{gbytes}.{lag}")
    collectives = DelayedCollectives(real, everybody, hardware, SCALE)
    values = torch.full((ROWS,), float(world.rank + 1))
    world.barrier()
    start = time.perf_counter()
    if world.rank == world.size - 1:
        time.sleep(lag)
    total = collectives.wait(collectives.all_reduce(values, "sum"))
    seconds = time.perf_counter() - start
    assert hardware.flights == []
    return total, seconds, hardware.reduce_seconds(everybody, SIZE)


def test_an_all_reduce_takes_as_long_as_on_the_modelled_network(world: World) -> None:
    total, seconds, predicted = summed(world, gbytes=0.5)
    assert predicted > 0.09
    assert predicted - 0.02 < seconds < 20 * predicted
    assert total.eq(world.size * (world.size + 1) / 2).all()


def test_an_all_reduce_starts_with_its_last_member(world: World) -> None:
    _, seconds, predicted = summed(world, gbytes=0.5, lag=0.1)
    assert seconds > predicted + 0.1 - 0.02


def test_an_all_reduce_on_a_fast_network_is_not_delayed(world: World) -> None:
    sleeps: list[float] = []
    _, _, predicted = summed(world, gbytes=1e6, sleeps=sleeps)
    # Of the modelled time, only the latency of 2 (ranks - 1) messages is left.
    assert predicted < 2 * (world.size - 1) * DILATION * 1.1e-3
    assert sum(sleeps) <= predicted


def test_operations_of_a_group_follow_one_another(world: World) -> None:
    everybody, hardware = tuple(range(world.size)), hardware_of(world, 0.5)
    communicator_among(everybody)
    real = MPICollectives(everybody, world.rank, "emulated.row")
    collectives = DelayedCollectives(real, everybody, hardware, SCALE)
    world.barrier()
    start = time.perf_counter()
    handles = [collectives.all_reduce(torch.ones(ROWS), name) for name in ("first", "second")]
    for handle in handles:
        collectives.wait(handle)
    predicted = 2 * hardware.reduce_seconds(everybody, SIZE)
    assert time.perf_counter() - start > predicted - 0.02
    expected = 2 * 2 * (world.size - 1) / world.size * SIZE
    assert collectives.sent_bytes == pytest.approx(expected)


def test_the_links_of_one_rank_are_found_to_be_slow(world: World) -> None:
    """All links of rank 1 are congested, after the network was measured."""
    hardware = hardware_of(world, 1.0)
    exchange = DelayedExchange(world, torch.device("cpu"), hardware, 1.0)
    hosts = ("here",) * world.size
    network = MeasuredNetwork(hosts, {}, transfer_curves(world, exchange, LINK_SIZES))
    cluster = replace(PRESETS["8-v100"], ranks=world.size, gbytes=1.0, latency_microseconds=1000.0)
    congested = replace(cluster, events=(Event(slows=LINKS, factor=20.0, ranks=(1,)),))
    exchange.hardware = Hardware.of_cluster(congested, world.rank, Clock(DILATION))
    links = link_curves(world, exchange, LINK_SIZES[-1])
    every = {(first, second) for second in range(world.size) for first in range(second)}
    assert set(links) == every
    assert world.gather(links) == [links] * world.size
    slow = set(network.with_links(links).slow_links)
    # Of two ranks there is one link: then the whole network is slow.
    assert slow == ({pair for pair in every if 1 in pair} if world.size > 2 else set())
