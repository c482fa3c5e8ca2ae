"""The program of the study's ranks: `python -m hvdtrain.study.collectives.ranks WORK ...`.

Rank 0 writes the result, whole or not at all.
"""

import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from hvdtrain import world
from hvdtrain.config import TrainConfig
from hvdtrain.errors import CheckFailed, UsageError
from hvdtrain.health import failure
from hvdtrain.host import harmless
from hvdtrain.host.launchers import has_horovod
from hvdtrain.host.poll import wait_until
from hvdtrain.host.stop import STOP_SIGNALS, end_with_parent
from hvdtrain.planner import choose, profilefile
from hvdtrain.planner.network import MeasuredNetwork
from hvdtrain.planner.probe import Start, horovod_sum, started_mpi_sum
from hvdtrain.study.collectives.cells import HOROVOD, MPI, this_machine, write_result
from hvdtrain.study.collectives.options import doublings
from hvdtrain.study.collectives.predictions import subject_of
from hvdtrain.sync.engine import check_algorithm
from hvdtrain.sync.mpi import MPICollectives
from hvdtrain.training.summary import versions
from hvdtrain.world import World

LEAST, MOST = 5, 40  # rounds over all sizes
SECONDS = 1.5  # of the rounds of a library, if that allows LEAST
# Horovod's cycle is that of models of up to 8 MiB: a longer one would delay small sums.
MODEL_BYTES = 0


def measure_sums(algorithm: str, largest: str, seed: str, path: str) -> None:
    """Measure all-reduces of fp32 up to `largest` bytes by MPI, then by Horovod. Collective.

    MPI goes first, since Horovod's thread communicates while it runs.
    """
    job = world.start(algorithm)
    assert job.communicator is not None
    torch.set_num_threads(1)
    sizes = doublings(int(largest))
    seconds: dict[str, dict[int, float]] = {}
    why_not: dict[str, str] = {}
    try:
        check_algorithm(algorithm)
    except UsageError as error:
        why_not[MPI] = str(error)
    else:
        everybody = tuple(range(job.size))
        world.communicator_among(everybody)
        start = started_mpi_sum(MPICollectives(everybody, job.rank, "study"))
        seconds[MPI] = sum_seconds(job, start, sizes, int(seed))
    if all(job.gather(has_horovod())):
        start = horovod_sum(world.start_horovod(MODEL_BYTES))
        seconds[HOROVOD] = sum_seconds(job, start, sizes, int(seed))
    else:
        why_not[HOROVOD] = "Horovod is not installed"
    if job.rank == 0:
        content: dict[str, Any] = {
            "algorithm": algorithm,
            "ranks": job.size,
            "sizes": list(sizes),
            "machine": this_machine(),
            "mpi": world.mpi().Get_library_version().split(",")[0].split("\n")[0].strip("\0 "),
            "versions": versions(["torch"]),
            "seconds": seconds,
            "not_measured": why_not,
        }
        write_result(Path(path), content)
    world.stop()


def sum_seconds(job: World, start: Start, sizes: Sequence[int], seed: int) -> dict[int, float]:
    """Return the seconds of an all-reduce by bytes: medians of the rounds. Collective.

    A round sums each size once, in random order. An all-reduce lasts from the end of a barrier
    until the last rank has the sum.

    Raises:
        CheckFailed: if a sum is wrong.
    """
    order = random.Random(seed)
    tensors = {size: torch.ones(size // 4) for size in sizes}
    _round(job, start, tensors)
    for size, values in tensors.items():
        if not bool((values == job.size).all()):
            raise CheckFailed(f"the all-reduce of {size} bytes has a wrong sum on rank {job.rank}")
        values.zero_()
    warm = _round(job, start, tensors)
    longest = max(job.gather(sum(warm.values())))
    rounds = int(min(MOST, max(LEAST, SECONDS / max(longest, 1e-9))))
    measured: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        shuffled = order.sample(list(sizes), len(sizes))  # the same on all ranks
        for size, value in _round(job, start, {size: tensors[size] for size in shuffled}).items():
            measured[size].append(value)
    slowest = np.max(job.gather([measured[size] for size in sizes]), axis=0)
    return {size: median(map(float, row)) for size, row in zip(sizes, slowest, strict=True)}


def _round(job: World, start: Start, tensors: dict[int, torch.Tensor]) -> dict[int, float]:
    """Sum each tensor in place, in the order of the dictionary; return the seconds by bytes."""
    assert job.communicator is not None
    seconds = {}
    for size, values in tensors.items():
        job.communicator.Barrier()  # its ranks leave it together; `World.barrier` sleeps
        began = time.perf_counter()
        wait_until(start(values, f"study.{size}"))
        seconds[size] = time.perf_counter() - began
    return seconds


def measure_profile(config_path: str, words: str, path: str) -> None:
    """Measure a model's components and the network of these ranks, as --plan auto does."""
    values = harmless.read_mapping(Path(config_path), "configuration")
    config = TrainConfig(**values)
    job = world.start(config.allreduce, config.threads, config.bind)
    torch.set_num_threads(job.threads)
    known = choose.measure(subject_of(config), job)
    if job.rank == 0:
        assert isinstance(known.network, MeasuredNetwork)
        profilefile.save(Path(path), words, known.profile, known.network)
    world.stop()


WORK: dict[str, Callable[..., None]] = {"sums": measure_sums, "profile": measure_profile}


def main(arguments: Sequence[str]) -> None:
    """Run one work on this rank; a failure ends the job with one report."""
    # The launcher blocks these signals for mpirun, and with it for its ranks.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    end_with_parent(signal.SIGTERM)
    try:
        WORK[arguments[0]](*arguments[1:])
    except BaseException as error:
        failure.fail(error)


if __name__ == "__main__":
    main(sys.argv[1:])
