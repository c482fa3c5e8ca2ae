"""The probes that doctor runs: `python -m hvdtrain.doctor.probe NAME` prints facts as JSON.

Each fact is printed as soon as it is known, so that a library which crashes the process loses only
its own facts. PyTorch and TensorFlow are never loaded in one process, since each loads its own
Horovod core.
"""

import importlib
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain import world
from hvdtrain.doctor.machine import bf16_speedups
from hvdtrain.doctor.process import WATCHED_SIZES, say
from hvdtrain.health import failure

REPETITIONS = 20


def mpi_libraries() -> list[str]:
    """Return the real paths of the MPI libraries that this process has loaded."""
    names = re.compile(r"lib(mpi|mpich|mpi_cray|mpi_gnu\w*|mpi_intel)\.so")
    words = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    return sorted({str(Path(path).resolve()) for path in words if names.match(Path(path).name)})


def describe(name: str) -> dict[str, str]:
    """Import a package, and return its version and folder, or the error in one line."""
    try:
        module = importlib.import_module(name)
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return {"error": text if len(text) <= 200 else f"{text[:200]}..."}
    return {
        "version": getattr(module, "__version__", ""),
        "path": str(Path(str(module.__file__)).parent),
    }


def torch_side() -> None:
    """Print facts of NumPy, h5py, PyTorch with its devices, and Horovod's PyTorch plugin."""
    for name in ("numpy", "h5py", "torch"):
        say(**{name: describe(name)})
    if "torch" in sys.modules:
        import torch

        from hvdtrain.device import gpu_count, gpu_name

        gpus = [gpu_name(number) for number in range(gpu_count())]
        say(cuda_version=torch.version.cuda, cuda_devices=gpus)
    say(horovod=horovod_plugin("torch"))
    if "torch" in sys.modules:
        say(precision=bf16_speedups())


def tensorflow_side() -> None:
    """Print facts of TensorFlow, Keras and Horovod's TensorFlow plugin."""
    for name in ("tensorflow", "keras"):
        say(**{name: describe(name)})
    say(horovod=horovod_plugin("tensorflow"))


def horovod_plugin(framework: str) -> dict[str, Any]:
    """Load Horovod's plugin for a framework, and return its build options and its MPI library."""
    facts: dict[str, Any] = describe(f"horovod.{framework}")
    if "error" in facts:
        return facts
    plugin = sys.modules[f"horovod.{framework}"]
    return facts | {
        "version": describe("horovod")["version"],
        "libraries": mpi_libraries(),
        "mpi": bool(plugin.mpi_built()),
        "gloo": bool(plugin.gloo_built()),
        "nccl": bool(plugin.nccl_built()),
    }


def mpi() -> None:
    """Print facts of mpi4py, the MPI library that it loads, and its thread support."""
    facts = describe("mpi4py.MPI")
    say(mpi4py=describe("mpi4py") if "error" not in facts else facts)
    if "error" in facts:
        return
    from mpi4py import MPI

    say(
        library=MPI.Get_library_version().strip("\0 \n"),
        libraries=mpi_libraries(),
        thread_multiple=MPI.Query_thread() >= MPI.THREAD_MULTIPLE,
    )


def allreduce() -> None:
    """Sum 1 MB of float32 through mpi4py and through Horovod, and print times and correctness."""
    import numpy

    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    current = world.start()
    say_on_rank_0(current, size=current.size)
    if current.communicator is None:
        return
    communicator = current.communicator
    mine = numpy.full(2**18, current.rank + 1.0, numpy.float32)
    total = numpy.empty_like(mine)
    milliseconds = median_milliseconds(lambda: communicator.Allreduce(mine, total))
    expected = current.size * (current.size + 1) / 2
    right = all(current.gather(bool((total == expected).all())))
    say_on_rank_0(current, mpi_right=right, mpi_milliseconds=milliseconds)
    say_on_rank_0(current, trace=watch(current, 2**20))

    import torch

    horovod = world.start_horovod(parameter_bytes=2**20)
    tensor = torch.from_numpy(mine)
    sums: list[Any] = []
    milliseconds = median_milliseconds(
        lambda: sums.append(horovod.allreduce(tensor, op=horovod.Sum))
    )
    right = all(current.gather(bool((sums[-1] == expected).all())))
    say_on_rank_0(current, horovod_right=right, horovod_milliseconds=milliseconds)
    process_sets = [horovod.add_process_set([rank]) for rank in range(current.size)]
    alone = horovod.allreduce(tensor, op=horovod.Sum, process_set=process_sets[current.rank])
    say_on_rank_0(current, process_sets_right=all(current.gather(bool((alone == tensor).all()))))
    world.stop()


def reductions(kind: str) -> None:
    """Print in which pieces and order all-reduces of several sizes are summed.

    Args:
        kind: "auto" or "ring", as in `hvdtrain train --allreduce`.
    """
    current = world.start(allreduce=kind)
    say_on_rank_0(current, size=current.size)
    for size in WATCHED_SIZES if current.communicator else ():
        say_on_rank_0(
            current, **{str(size): {"trace": watch(current, size), "sums": sums(current, size)}}
        )
    world.stop()


def watch(current: world.World, size: int) -> list[list[list[int]]]:
    """Return the pieces that each rank adds in an all-reduce: [elements, ranks in a, ranks in b].

    The all-reduce uses its own operation, and the data are bit masks of ranks: the value of an
    element shows which contributions it holds. Algorithms differ in exactly these pieces.
    """
    import numpy
    from mpi4py import MPI

    assert current.communicator is not None
    pieces: list[list[int]] = []

    def unite(source: Any, target: Any, datatype: MPI.Datatype) -> None:
        a = numpy.frombuffer(source, numpy.int64)
        b = numpy.frombuffer(target, numpy.int64)
        pieces.append([len(a), int(a[0]), int(b[0])])
        b |= a

    operation = MPI.Op.Create(unite, commute=True)
    mine = numpy.full(size // 8, 1 << current.rank, numpy.int64)
    current.communicator.Allreduce(mine, numpy.empty_like(mine), operation)
    operation.Free()
    return current.gather(pieces)


def sums(current: world.World, size: int) -> int:
    """Return the number of different sums in an all-reduce of constant buffers with MPI's SUM.

    Rounding depends on the order of summation: a ring starts each part of the buffer at another
    rank and so gives several sums, an algorithm with one order for the whole buffer gives one.
    """
    import numpy

    assert current.communicator is not None
    terms = (0.1, 1e8 + 0.3, -1e8, 3.7)
    mine = numpy.full(size // 8, terms[current.rank % len(terms)], numpy.float64)
    total = numpy.empty_like(mine)
    current.communicator.Allreduce(mine, total)
    return len(numpy.unique(total))


def median_milliseconds(act: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Return the median time of an action in ms, after two runs to warm up."""
    times = []
    for _ in range(repetitions + 2):
        start = time.perf_counter()
        act()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def say_on_rank_0(current: world.World, **facts: Any) -> None:
    """Print facts on rank 0 only."""
    if current.rank == 0:
        say(**facts)


PROBES: dict[str, Callable[..., None]] = {
    "mpi": mpi,
    "torch": torch_side,
    "tensorflow": tensorflow_side,
    "allreduce": allreduce,
    "reductions": reductions,
}


def main() -> None:
    """Run the probe that the command line names; a rank that fails ends all ranks."""
    name, *arguments = sys.argv[1:]
    try:
        PROBES[name](*arguments)
    except Exception as error:
        failure.fail(error)


if __name__ == "__main__":
    main()
