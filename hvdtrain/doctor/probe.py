"""What doctor's own processes run: `python -m hvdtrain.doctor.probe NAME` prints facts as JSON.

Each fact is printed as soon as it is known, so that a library that ends the process takes only
its own facts with it. Never torch and TensorFlow in one process: each brings a Horovod core.
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

from hvdtrain import failure, world
from hvdtrain.doctor.precision import bf16_speedups
from hvdtrain.doctor.protocol import WATCHED_SIZES, say

REPETITIONS = 20


def mpi_libraries() -> list[str]:
    """Real paths of the MPI libraries that this process has loaded."""
    names = re.compile(r"lib(mpi|mpich|mpi_cray|mpi_gnu\w*|mpi_intel)\.so")
    words = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    return sorted({str(Path(path).resolve()) for path in words if names.match(Path(path).name)})


def describe(name: str) -> dict[str, str]:
    """Import a package: its version and file, or the error in one line."""
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
    """NumPy, h5py, PyTorch with its devices and speeds, Horovod's PyTorch plugin and its MPI."""
    for name in ("numpy", "h5py", "torch"):
        say(**{name: describe(name)})
    if "torch" in sys.modules:
        import torch

        devices = range(torch.cuda.device_count())
        say(
            cuda_version=torch.version.cuda,
            cuda_devices=[torch.cuda.get_device_name(device) for device in devices],
        )
    say(horovod=horovod_plugin("torch"))
    if "torch" in sys.modules:
        say(precision=bf16_speedups())


def tensorflow_side() -> None:
    """TensorFlow, Keras and Horovod's TensorFlow plugin and its MPI."""
    for name in ("tensorflow", "keras"):
        say(**{name: describe(name)})
    say(horovod=horovod_plugin("tensorflow"))


def horovod_plugin(framework: str) -> dict[str, Any]:
    """Load Horovod for a framework: what it was built with and the MPI that it brings in."""
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
    """mpi4py, the MPI library that it loads, and the level of thread support."""
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
    """Sum 1 MB of float32 through mpi4py and through Horovod, with time and correctness."""
    import numpy

    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    here = world.start()
    say_on_rank_0(here, size=here.size)
    if here.communicator is None:
        return
    communicator = here.communicator
    mine = numpy.full(2**18, here.rank + 1.0, numpy.float32)
    total = numpy.empty_like(mine)
    milliseconds = median_milliseconds(lambda: communicator.Allreduce(mine, total))
    expected = here.size * (here.size + 1) / 2
    right = all(here.gather(bool((total == expected).all())))
    say_on_rank_0(here, mpi_right=right, mpi_milliseconds=milliseconds)
    say_on_rank_0(here, trace=watch(here, 2**20))

    import torch

    horovod = world.start_horovod(parameter_bytes=2**20)
    tensor = torch.from_numpy(mine)
    sums: list[Any] = []
    milliseconds = median_milliseconds(
        lambda: sums.append(horovod.allreduce(tensor, op=horovod.Sum))
    )
    right = all(here.gather(bool((sums[-1] == expected).all())))
    say_on_rank_0(here, horovod_right=right, horovod_milliseconds=milliseconds)
    own_sets = [horovod.add_process_set([rank]) for rank in range(here.size)]
    alone = horovod.allreduce(tensor, op=horovod.Sum, process_set=own_sets[here.rank])
    say_on_rank_0(here, process_sets_right=all(here.gather(bool((alone == tensor).all()))))
    world.stop()


def reductions(kind: str) -> None:
    """Watch in which pieces and order all-reduces of several sizes are summed.

    Args:
        kind: "auto" or "ring", as in `hvdtrain train --allreduce`.
    """
    here = world.start(allreduce=kind)
    say_on_rank_0(here, size=here.size)
    for size in WATCHED_SIZES if here.communicator else ():
        say_on_rank_0(here, **{str(size): {"trace": watch(here, size), "sums": sums(here, size)}})
    world.stop()


def watch(here: world.World, size: int) -> list[list[list[int]]]:
    """By rank, the pieces that it adds in an all-reduce: [elements, ranks in a, ranks in b].

    The operation of this all-reduce is our own, and the data are bit masks of ranks: an element's
    value says whose contributions it holds already. Algorithms differ in just these pieces.
    """
    import numpy
    from mpi4py import MPI

    assert here.communicator is not None
    pieces: list[list[int]] = []

    def unite(source: Any, target: Any, datatype: MPI.Datatype) -> None:
        a = numpy.frombuffer(source, numpy.int64)
        b = numpy.frombuffer(target, numpy.int64)
        pieces.append([len(a), int(a[0]), int(b[0])])
        b |= a

    operation = MPI.Op.Create(unite, commute=True)
    mine = numpy.full(size // 8, 1 << here.rank, numpy.int64)
    here.communicator.Allreduce(mine, numpy.empty_like(mine), operation)
    operation.Free()
    return here.gather(pieces)


def sums(here: world.World, size: int) -> int:
    """How many different sums an all-reduce of constant buffers gives (MPI's own SUM).

    Rounding depends on the order of summation: a ring starts each part of the buffer at another
    rank and so gives several, an algorithm with one order for the whole buffer gives one.
    """
    import numpy

    assert here.communicator is not None
    terms = (0.1, 1e8 + 0.3, -1e8, 3.7)
    mine = numpy.full(size // 8, terms[here.rank % len(terms)], numpy.float64)
    total = numpy.empty_like(mine)
    here.communicator.Allreduce(mine, total)
    return len(numpy.unique(total))


def median_milliseconds(act: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Median time of an action in ms, after two runs to warm up."""
    times = []
    for _ in range(repetitions + 2):
        start = time.perf_counter()
        act()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def say_on_rank_0(here: world.World, **facts: Any) -> None:
    """Print facts once for all ranks."""
    if here.rank == 0:
        say(**facts)


PROBES: dict[str, Callable[..., None]] = {
    "mpi": mpi,
    "torch": torch_side,
    "tensorflow": tensorflow_side,
    "allreduce": allreduce,
    "reductions": reductions,
}


def main() -> None:
    """Run the probe that the command line names; on ranks, one that fails ends them all."""
    name, *arguments = sys.argv[1:]
    try:
        PROBES[name](*arguments)
    except Exception as error:
        failure.fail(error)


if __name__ == "__main__":
    main()
