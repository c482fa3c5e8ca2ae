"""The probes that doctor runs: `python -m hvdtrain.doctor.probe NAME` prints facts as JSON.

Each fact is printed as soon as it is known, so that a library which crashes the process loses only
its own facts. PyTorch and TensorFlow are never loaded in one process, since each loads its own
Horovod core.

`doctor --job` is here too: the ranks of a job examine the allocation together.
"""

import importlib
import os
import re
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain import __version__, world
from hvdtrain.doctor.check import WATCHED_SIZES, Check, is_fit, report_as_json, say, show
from hvdtrain.doctor.machine import bf16_speedups
from hvdtrain.errors import DataError, UsageError
from hvdtrain.health import failure
from hvdtrain.host.launchers import has_horovod
from hvdtrain.host.process import usable_cores
from hvdtrain.world import World

SECONDS_TO_SHOW = 10.0  # limit until a network file system shows another host's file
ELEMENTS = 25_000_000 // 4  # size of the timed all-reduce: a small ResNet's gradients
ROUNDS = 5
MEGA = 2**20


@dataclass(frozen=True)
class Seen:
    """The properties of one rank and its host, as the rank sees them."""

    host: str
    cores: tuple[int, ...]
    threads: int
    gpus: int
    shared_memory: int
    versions: str
    folder_seconds: float | None


def preflight(as_json: bool) -> int:
    """Examine the ranks of this job, and print the results on rank 0. Collective.

    Returns:
        The exit code: 0 if the allocation is fit, 1 if a check failed.

    Raises:
        UsageError: outside a job of several ranks, or if its ranks cannot connect.
        DataError: if the current folder cannot be written to.
    """
    current = world.start()
    if current.size == 1:
        raise UsageError(
            "doctor --job checks the ranks of a job: start it as you start train, such as "
            "srun --mpi=pmix hvdtrain doctor --job"
        )
    checks = job_checks(current.launcher, current.gather(_look(current)))
    if current.rank == 0 and not as_json:
        # Printed before the all-reduce, which may hang if the network is at fault.
        show(
            checks, {}, f"Running an all-reduce of {4 * ELEMENTS / MEGA:.0f} MiB on all ranks ..."
        )
    checks.append(_sum(current))
    world.stop()
    if current.rank == 0:
        faults = [check.name for check in checks if check.state == "fault"]
        closing = f"This job has faults: {', '.join(faults)}." if faults else "This job is fit."
        print(report_as_json(checks, {})) if as_json else show(checks[-1:], {}, closing)
    return 0 if is_fit(checks) else 1


def job_checks(launcher: str, seen: Sequence[Seen]) -> list[Check]:
    """Return the checks that follow from the properties of the ranks."""
    hosts = Counter(one.host for one in seen)
    places = ", ".join(f"{count} on {host}" for host, count in hosts.items())
    versions = Counter(one.versions for one in seen)
    same = Check("versions", "ok", f"{seen[0].versions} on all ranks")
    if len(versions) > 1:
        text = "; ".join(f"{value} on {count} rank(s)" for value, count in versions.items())
        same = Check("versions", "fault", text, "use one environment on all nodes")
    least = min(seen, key=lambda one: one.shared_memory)
    text = f"{least.shared_memory / MEGA:,.0f} MiB free in /dev/shm of {least.host}"
    memory = Check("shared memory", "ok", text)
    if least.shared_memory < 64 * MEGA:
        memory = Check("shared memory", "fault", text, "MPI needs it: ask the site, or free it")
    ranks = Check("ranks", "ok", f"{len(seen)} by {launcher}: {places}")
    return [ranks, same, _affinity(seen), _gpus(seen), memory, _folder(seen)]


def _look(current: World) -> Seen:
    from hvdtrain.device import gpu_count

    memory = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return Seen(
        host=socket.gethostname(),
        cores=tuple(sorted(usable_cores())),
        threads=current.threads,
        gpus=gpu_count(),
        shared_memory=memory.f_bavail * memory.f_frsize if memory else 0,
        versions=f"hvdtrain {__version__}, Python {sys.version.split()[0]}",
        folder_seconds=_see_folder(current),
    )


def _see_folder(current: World) -> float | None:
    """Return the seconds until this rank sees a new file of rank 0 in the current folder.

    None if it does not see the file within SECONDS_TO_SHOW.
    """
    path = current.broadcast(Path.cwd() / f".hvdtrain-doctor-{os.getpid()}")
    fault = ""
    if current.rank == 0:
        try:
            path.touch()
        except OSError as error:
            fault = f"{Path.cwd()} is not writable ({error.strerror}): work in another folder"
    if fault := current.broadcast(fault):
        raise DataError(fault)
    start = time.monotonic()
    while not (is_seen := path.exists()) and time.monotonic() - start < SECONDS_TO_SHOW:
        time.sleep(0.05)
    late = time.monotonic() - start
    current.barrier()
    if current.rank == 0:
        path.unlink()
    return late if is_seen else None


def _sum(current: World) -> Check:
    """Return the check of an all-reduce by Horovod, or MPI if a rank has none, with its time."""
    import torch

    values = torch.full((ELEMENTS,), float(current.rank))
    sums: list[Any] = []
    if by_horovod := all(current.gather(has_horovod() and current.has_multiple_threads)):
        horovod = world.start_horovod(4 * ELEMENTS)

    def add() -> None:
        if by_horovod:
            sums.append(horovod.allreduce(values, op=horovod.Sum, name="preflight"))
            return
        assert current.communicator is not None
        sums.append(torch.empty_like(values))
        current.communicator.Allreduce(values.numpy(), sums[-1].numpy())

    milliseconds = median_milliseconds(add, ROUNDS)
    expected = current.size * (current.size - 1) / 2
    if not all(current.gather(all(bool((total == expected).all()) for total in sums))):
        return Check("all-reduce", "fault", "the sum is wrong", "ask the site about its MPI")
    slowest, size = max(current.gather(milliseconds)), 4 * ELEMENTS / MEGA
    rate = 1e3 * size / slowest
    return Check("all-reduce", "ok", f"{size:.0f} MiB in {slowest:.1f} ms, {rate:,.0f} MiB/s")


def _affinity(seen: Sequence[Seen]) -> Check:
    """Return the check that each rank has enough cores, and cores that no other rank uses."""
    crowded = []
    for host in dict.fromkeys(one.host for one in seen):
        ranks = [one for one in seen if one.host == host]
        cores = {core for one in ranks for core in one.cores}
        threads = sum(one.threads for one in ranks)
        if threads > len(cores):
            crowded.append(f"{threads} threads on {len(cores)} cores of {host}")
    numbers = sorted({one.threads for one in seen})
    text = f"{' or '.join(map(str, numbers))} thread(s) per rank"
    if crowded:
        cure = "request more CPUs per task (--cpus-per-task), or fewer ranks"
        return Check("cores", "note", f"{text}: {'; '.join(crowded)}", cure)
    return Check("cores", "ok", text)


def _gpus(seen: Sequence[Seen]) -> Check:
    having = [one for one in seen if one.gpus]
    if not having:
        return Check("GPUs", "ok", "none: ranks train on CPUs")
    if len(having) < len(seen):
        hosts = ", ".join(sorted({one.host for one in seen if not one.gpus}))
        return Check("GPUs", "fault", f"none on {hosts}", "request GPUs on every node")
    ranks = Counter(one.host for one in seen)
    crowded = sorted({one.host for one in seen if ranks[one.host] > one.gpus > 1})
    if crowded:
        text = f"fewer GPUs than ranks on {', '.join(crowded)}"
        return Check("GPUs", "note", text, "request one GPU per rank (--gpus-per-node)")
    return Check("GPUs", "ok", f"{having[0].gpus} seen by each rank of {having[0].host}")


def _folder(seen: Sequence[Seen]) -> Check:
    blind = sorted({one.host for one in seen if one.folder_seconds is None})
    name = "file system"
    if blind:
        text = f"{Path.cwd()} is not the same folder on {', '.join(blind)}"
        return Check(name, "fault", text, "work in a folder that all nodes share")
    late = max(one.folder_seconds or 0.0 for one in seen)
    return Check(name, "ok", f"all ranks see {Path.cwd()}, a new file within {late:.1f} s")


REPETITIONS = 20


def mpi_libraries() -> list[str]:
    """Return the real paths of the MPI libraries that this process has loaded."""
    names = re.compile(r"lib(mpi|mpich|mpi_cray|mpi_gnu\w*|mpi_intel)\.so")
    maps = Path("/proc/self/maps")
    if not maps.exists():  # only Linux has it
        return []
    words = (line.split()[-1] for line in maps.read_text().splitlines())
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

    levels = {MPI.THREAD_MULTIPLE: "MULTIPLE", MPI.THREAD_SERIALIZED: "SERIALIZED"}
    say(
        library=MPI.Get_library_version().strip("\0 \n"),
        libraries=mpi_libraries(),
        threads=levels.get(MPI.Query_thread(), "fewer"),
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

    if not current.has_multiple_threads:
        return
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
