"""`bench allreduce` and `bench exchange`: what sums and hand-overs take between ranks, by size.

As the OSU micro-benchmarks (Panda et al., osu_allreduce and osu_latency) measure them, on what
training uses: Horovod's sum, MPI's own beside it, and the exchange of the pipeline.
"""

from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain import world
from hvdtrain.errors import UsageError
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.planner import probe
from hvdtrain.planner.curve import Curve
from hvdtrain.planner.network import Contention
from hvdtrain.world import World


@dataclass(frozen=True)
class Table:
    """Microseconds and bandwidth by size.

    Attributes:
        title: what was measured, on which ranks.
        curves: by what they are of.
        factor: bytes that a rank sends for each byte of the message (bus bandwidth, as of
            nccl-tests: 2 (n - 1) / n for a sum).
    """

    title: str
    curves: dict[str, Curve]
    factor: float
    contention: Contention | None = None

    def as_json(self) -> dict[str, Any]:
        """As one JSON object."""
        found: dict[str, Any] = {
            "title": self.title,
            "seconds": {
                name: {str(int(size)): seconds for size, seconds in curve.points}
                for name, curve in self.curves.items()
            },
            "lines": {
                name: {"latency_seconds": curve.line.fixed, "seconds_a_byte": curve.line.each}
                for name, curve in self.curves.items()
            },
        }
        if self.contention is not None:
            found["contention"] = self.contention._asdict()
        return found

    def as_text(self) -> str:
        """As a table."""
        heads = "".join(f"{f'{name} us':>16}{'GB/s':>8}" for name in self.curves)
        lines = [self.title, f"{'bytes':>10}{heads}"]
        sizes = [size for size, _ in next(iter(self.curves.values())).points]
        for size in sizes:
            cells = "".join(
                f"{1e6 * curve(size):>16.1f}{self.factor * size / curve(size) / 1e9:>8.2f}"
                for curve in self.curves.values()
            )
            lines.append(f"{int(size):>10}{cells}")
        for name, curve in self.curves.items():
            line = curve.line
            rate = f"{1e-9 / line.each:.2f} GB/s" if line.each else "no limit seen"
            lines.append(f"{name}: about {1e6 * line.fixed:.1f} us and {rate}")
        if self.contention is not None:
            lines.append(
                f"beside computing a sum takes {self.contention.reduce:.2f} times as long, and "
                f"what is computed {self.contention.compute:.2f} times"
            )
        return "\n".join(lines)


def bench_allreduce(largest: int, algorithm: str = "auto") -> Table:
    """Sums over all ranks. Collective.

    Args:
        largest: bytes of the largest sum.
        algorithm: of MPI, by the names of `ALGORITHMS`.

    Raises:
        UsageError: if there is but one rank.
    """
    here = _world("allreduce", algorithm)
    horovod = world.start_horovod(largest)
    sizes = probe.sizes_up_to(largest)
    start = probe.horovod_sum(horovod)
    curves = {
        "Horovod": probe.reduce_curve(here, start, sizes),
        "MPI": probe.reduce_curve(here, probe.mpi_sum(here.communicator), sizes),
    }
    size = min(probe.CONTENDED_BYTES, sizes[-1])
    contention = probe.measure_contention(here, start, curves["Horovod"], size)
    world.stop()
    title = f"sum of fp32 over {here.size} ranks, {algorithm}; GB/s is what each rank sends"
    return Table(title, curves, 2 * (here.size - 1) / here.size, contention)


def bench_exchange(largest: int) -> Table:
    """Hand-overs between two ranks of one host, and of two hosts where there are. Collective.

    Beside them MPI's broadcast to all ranks, which no step of a plan needs.

    Raises:
        UsageError: if there is but one rank.
    """
    here = _world("exchange")
    assert here.communicator is not None
    exchange = Exchange(here.communicator, torch.device("cpu"))
    sizes = probe.sizes_up_to(largest)
    network = probe.hand_over_curves(here, exchange, sizes)
    broadcast = probe.broadcast_curve(here, sizes)
    names = {False: "on one host", True: "between hosts"}
    world.stop()
    curves = {names[crosses]: curve for crosses, curve in sorted(network.items())}
    curves[f"to all {here.size}"] = broadcast
    return Table("hand-over of a tensor from rank to rank, one way; broadcast to all", curves, 1.0)


def _world(name: str, algorithm: str = "auto") -> World:
    here = world.start(algorithm)
    torch.set_num_threads(here.threads)
    if here.size < 2:
        raise UsageError(f"bench {name} is between ranks: give --ranks 2 or more")
    return here
