"""hvdtrain's Exchange against plain mpi4py: how fast a tensor goes from rank to rank.

    python benchmarks/exchange.py [--rounds 15] [--largest 67108864]

Two ranks of one job send a message back and forth (a ping-pong, as in the OSU and Intel MPI
benchmarks): half a round trip is what a hand-over takes. hvdtrain's side is what the runtime calls
for each hand-over: `receive`, `send` and `wait`, with the time of sending that travels along;
mpi4py's side is Irecv, Isend and Wait on NumPy buffers, and nothing else. The sides take turns in
the same two processes. Times are medians of the rounds; the best ratio is that of the fastest
rounds, which a busy machine disturbs least. A ratio is above 1 where hvdtrain is faster.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import common

from hvdtrain import world
from hvdtrain.launch import mpirun

SIZES = tuple(2**power for power in (3, 6, 9, 12, 14, 16, 18, 20, 22, 24, 26))
BYTES_A_ROUND, LONGEST_ROUND = 64 * 2**20, 100  # of each side: so much, in at most so many trips
RANKS = 2


def main() -> None:
    """Start both ranks and print a table, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest", type=int, default=64 * 2**20, help="bytes of a message")
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.is_rank:
        _rank(options)
        return
    own = [sys.executable, __file__, "--is-rank"]
    own += ["--rounds", str(options.rounds), "--largest", str(options.largest)]
    _print_table(json.loads(common.run_all([[*mpirun(RANKS), *own]], threads=1)[0]))


def _print_table(found: dict[str, list[list[float]]]) -> None:
    print(f"{'bytes':>10} {'ours us':>10} {'mpi4py us':>10} {'ratio':>6} {'best':>6} {'GB/s':>6}")
    for size, rounds in found.items():
        sides = [[times[side] for times in rounds] for side in (0, 1)]
        own, other = map(statistics.median, sides)
        print(
            f"{int(size):>10} {1e6 * own:>10.1f} {1e6 * other:>10.1f} {other / own:>6.3f} "
            f"{min(sides[1]) / min(sides[0]):>6.3f} {int(size) / own / 1e9:>6.2f}"
        )


def _rank(options: argparse.Namespace) -> None:
    """Measure all sizes, and print the seconds of each round of both sides on rank 0."""
    import torch

    from hvdtrain.parallel.exchange import Exchange

    here = world.start(threads=1)
    assert here.communicator is not None, "started by the main program alone"
    exchange = Exchange(here.communicator, torch.device("cpu"))
    found = {}
    for size in (size for size in SIZES if size <= options.largest):
        trips = max(1, min(LONGEST_ROUND, BYTES_A_ROUND // (2 * size)))
        # The same memory for both: NumPy would ask for huge pages, which PyTorch does not.
        sent, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        sides = (
            ours(exchange, 1 - here.rank, sent, target),
            theirs(here.communicator, 1 - here.rank, sent.numpy(), target.numpy()),
        )
        for side in sides:
            seconds_of(side, here, 2)  # memory is mapped and connections are made at first use
        rounds = []
        for number in range(options.rounds):
            first = number % 2
            times = {k: seconds_of(sides[k], here, trips) for k in (first, 1 - first)}
            rounds.append([times[0], times[1]])
        found[str(size)] = rounds
    if here.rank == 0:
        print(json.dumps(found))
    world.stop()


def seconds_of(trip: Callable[[], None], here: world.World, trips: int) -> float:
    """Half of the mean round trip."""
    here.barrier()
    began = time.perf_counter()
    for _ in range(trips):
        trip()
    return (time.perf_counter() - began) / trips / 2


def ours(exchange: Any, peer: int, sent: Any, target: Any) -> Callable[[], None]:
    """One trip there and back of a tensor through an `Exchange`."""

    def trip() -> None:
        receipt = exchange.receive(target, peer, 1)
        if peer == 1:
            exchange.send(sent, peer, 1)
        exchange.wait([receipt])
        if peer == 0:
            exchange.send(sent, peer, 1)

    return trip


def theirs(communicator: Any, peer: int, sent: Any, target: Any) -> Callable[[], None]:
    """The same of a NumPy array through mpi4py."""

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
