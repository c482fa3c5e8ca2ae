"""Compares the transfer time of hvdtrain's Exchange with plain mpi4py.

    python benchmarks/exchange.py [--rounds 15] [--largest 67108864]

Two ranks of one job send a message back and forth (a ping-pong as in the OSU and Intel MPI
benchmarks); a transfer takes half a round trip. hvdtrain's side makes the calls of the runtime for
each transfer: `receive`, `send` and `wait`, with the send time in the message. mpi4py's side is
only Irecv, Isend and Wait on NumPy buffers. The sides take turns in the same two processes.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import common
from comparison import Comparison, report

from hvdtrain import world
from hvdtrain.host import counters
from hvdtrain.launch import mpirun

SIZES = tuple(2**power for power in (3, 6, 9, 12, 14, 16, 18, 20, 22, 24, 26))
BYTES_PER_ROUND, LONGEST_ROUND = 64 * 2**20, 100  # bytes and most round trips of each side
RANKS = 2
GOAL, LARGE = 0.95, 2**20  # times as fast as mpi4py, from this many bytes on


def main() -> None:
    """Start both ranks and compare their figures, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--largest", type=int, default=64 * 2**20, help="bytes of the largest message"
    )
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.is_rank:
        _rank(options)
        return
    rank_command = [sys.executable, __file__, "--is-rank"]
    rank_command += ["--rounds", str(options.rounds), "--largest", str(options.largest)]
    before = counters.read_load()
    printed = common.run_all([[*mpirun(RANKS), *rank_command]], threads=1)[0]
    beside = counters.disturbance([counters.read_load().since(before)])
    for size, rounds in json.loads(printed).items():
        ours, theirs = ([1e6 * seconds[side] for seconds in rounds] for side in (0, 1))
        title, sides = f"{int(size):,} bytes", {"hvdtrain": ours, "mpi4py": theirs}
        cores = [beside.other_cores + beside.stolen_cores] * len(rounds)
        goals = {"mpi4py": GOAL} if int(size) >= LARGE else {}
        comparison = Comparison(title, "us", sides, {}, cores, goals)
        if beside.is_large:  # all rounds are of one job
            without: dict[str, list[float]] = {"hvdtrain": [], "mpi4py": []}
            comparison = Comparison(title, "us", without, sides, [], goals)
        report(comparison)


def _rank(options: argparse.Namespace) -> None:
    """Measure all sizes; rank 0 prints the seconds of each round of both sides."""
    import torch

    from hvdtrain.parallel.exchange import Exchange

    job = world.start(threads=1)
    assert job.communicator is not None, "started by the main program alone"
    exchange = Exchange(job.communicator, torch.device("cpu"))
    rounds_by_size = {}
    for size in (size for size in SIZES if size <= options.largest):
        trips = max(1, min(LONGEST_ROUND, BYTES_PER_ROUND // (2 * size)))
        # Both sides use the same memory: NumPy would request huge pages, PyTorch does not.
        sent, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        sides = (
            ours(exchange, 1 - job.rank, sent, target),
            theirs(job.communicator, 1 - job.rank, sent.numpy(), target.numpy()),
        )
        for side in sides:
            seconds_of(side, job, 2)  # the first use maps memory and opens connections
        rounds = []
        for number in range(options.rounds):
            first = number % 2
            times = {k: seconds_of(sides[k], job, trips) for k in (first, 1 - first)}
            rounds.append([times[0], times[1]])
        rounds_by_size[str(size)] = rounds
    if job.rank == 0:
        print(json.dumps(rounds_by_size))
    world.stop()


def seconds_of(trip: Callable[[], None], job: world.World, trips: int) -> float:
    """Return half of the mean seconds of a round trip."""
    job.barrier()
    began = time.perf_counter()
    for _ in range(trips):
        trip()
    return (time.perf_counter() - began) / trips / 2


def ours(exchange: Any, peer: int, sent: Any, target: Any) -> Callable[[], None]:
    """Return a function that sends a tensor there and back through an `Exchange`."""

    def trip() -> None:
        receipt = exchange.receive(target, peer, 1)
        if peer == 1:
            exchange.send(sent, peer, 1)
        exchange.wait([receipt])
        if peer == 0:
            exchange.send(sent, peer, 1)

    return trip


def theirs(communicator: Any, peer: int, sent: Any, target: Any) -> Callable[[], None]:
    """Return a function that sends a NumPy array there and back through mpi4py."""

    def trip() -> None:
        receipt = communicator.Irecv(target, peer, 2)
        if peer == 1:
            sending = communicator.Isend(sent, peer, 2)
        receipt.Wait()
        if peer == 0:
            sending = communicator.Isend(sent, peer, 2)
        sending.Wait()

    return trip


if __name__ == "__main__":
    main()
