"""`bench allreduce` and `bench exchange`: seconds of all-reduces and transfers by size.

The method is that of the OSU micro-benchmarks (Panda et al., osu_allreduce and osu_latency), with
the functions that training uses: Horovod's all-reduce, MPI's own for comparison, and the exchange
of the pipeline.
"""

from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain import world
from hvdtrain.errors import UsageError
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.planner import probe
from hvdtrain.planner.network import Contention, Curve
from hvdtrain.world import World


@dataclass(frozen=True)
class Table:
    """Microseconds and bandwidth by size.

    Attributes:
        title: the operation and its ranks.
        curves: seconds by bytes, by the name of the operation.
        factor: bytes that a rank sends for each byte of the message (bus bandwidth as in
            nccl-tests: 2 (n - 1) / n for an all-reduce).
    """

    title: str
    curves: dict[str, Curve]
    factor: float
    contention: Contention | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the table as one JSON object."""
        result: dict[str, Any] = {
            "title": self.title,
            "seconds": {
                name: {str(int(size)): seconds for size, seconds in curve.points}
                for name, curve in self.curves.items()
            },
            "lines": {
                name: {"latency_seconds": curve.line.fixed, "seconds_a_byte": curve.line.per_unit}
                for name, curve in self.curves.items()
            },
        }
        if self.contention is not None:
            result["contention"] = self.contention._asdict()
        return result

    def as_text(self) -> str:
        """Return the table as text."""
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
            rate = (
                f"{1e-9 / line.per_unit:.2f} GB/s"
                if line.per_unit
                else "no limit of bandwidth seen"
            )
            lines.append(f"{name}: about {1e6 * line.fixed:.1f} us latency, {rate}")
        if self.contention is not None:
            reduce, compute = self.contention.reduce, self.contention.compute
            lines.append(
                f"during computing an all-reduce is {reduce:.2f}x slower, and computing is "
                f"{compute:.2f}x slower during an all-reduce"
            )
        return "\n".join(lines)


def bench_allreduce(largest: int, algorithm: str = "auto") -> Table:
    """Measure all-reduces over all ranks. Collective.

    Args:
        largest: bytes of the largest all-reduce.
        algorithm: MPI's algorithm, one of `ALGORITHMS`.

    Raises:
        UsageError: if there is only one rank.
    """
    job = _world("allreduce", algorithm)
    horovod = world.start_horovod(largest)
    sizes = probe.sizes_up_to(largest)
    start = probe.horovod_sum(horovod)
    curves = {
        "Horovod": probe.reduce_curve(job, probe.Tools(start), sizes),
        "MPI": probe.reduce_curve(job, probe.Tools(probe.mpi_sum(job.communicator)), sizes),
    }
    size = min(probe.CONTENDED_BYTES, sizes[-1])
    contention = probe.measure_contention(job, probe.Tools(start), curves["Horovod"], size)
    world.stop()
    title = f"all-reduce of fp32 over {job.size} ranks, {algorithm}; GB/s sent by each rank"
    return Table(title, curves, 2 * (job.size - 1) / job.size, contention)


def bench_exchange(largest: int) -> Table:
    """Measure transfers between two ranks of one host, and of two hosts if possible. Collective.

    MPI's broadcast to all ranks is measured for comparison; no step of a plan needs it.

    Raises:
        UsageError: if there is only one rank.
    """
    job = _world("exchange")
    assert job.communicator is not None
    exchange = Exchange(job.communicator, torch.device("cpu"))
    sizes = probe.sizes_up_to(largest)
    network = probe.transfer_curves(job, exchange, sizes)
    broadcast = probe.broadcast_curve(job, sizes)
    names = {False: "on one host", True: "between hosts"}
    world.stop()
    curves = {names[crosses]: curve for crosses, curve in sorted(network.items())}
    curves[f"to all {job.size}"] = broadcast
    return Table("transfer of a tensor between two ranks, one way; broadcast to all", curves, 1.0)


def _world(name: str, algorithm: str = "auto") -> World:
    job = world.start(algorithm)
    torch.set_num_threads(job.threads)
    if job.size < 2:
        raise UsageError(f"bench {name} needs several ranks: use --ranks 2 or more")
    return job
