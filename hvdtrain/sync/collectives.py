"""Collective operations among the replicas of a stage, by Horovod or by MPI alone.

Every operation starts with a call that returns at once, and ends with `wait`. All replicas start
the same operations by name, after `prepare` in any order.

MPI's non-blocking operations of one communicator must start in the same order on all ranks, but a
replica without samples starts its buckets in another order than the hooks of the others. Every
name therefore has a communicator of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hvdtrain import device, world
from hvdtrain import world as worlds
from hvdtrain.errors import UsageError
from hvdtrain.host.launchers import has_horovod
from hvdtrain.host.process import wait_until
from hvdtrain.options.sections import Library
from hvdtrain.plan import traffic
from hvdtrain.plan.traffic import Operation
from hvdtrain.world import World


class Collectives(Protocol):
    """Collective operations of one group of ranks.

    Attributes:
        size: number of replicas.
        place: of this rank among the replicas, from 0.
        sent_bytes: bytes that this rank has sent so far, as `plan/traffic.py` counts them.
        scale: bytes that each byte of a tensor counts for; above 1 in an emulation.
    """

    size: int
    place: int
    sent_bytes: float
    scale: float = 1.0

    def prepare(self, names: Sequence[str]) -> None:
        """Announce operations by name, in the same order on all replicas. Collective among them.

        An operation that was not announced must start for the first time in the same order on all
        replicas; afterwards, and after an announcement, the order may differ.
        """

    def all_reduce(self, tensor: Tensor, name: str) -> Any:
        """Start to replace a tensor by its sum over the replicas; return a handle."""

    def all_gather(self, tensor: Tensor, name: str) -> Any:
        """Start to gather every replica's tensor [n], all of one length; return a handle.

        `wait` returns them as [replicas, n].
        """

    def reduce_scatter(self, tensor: Tensor, name: str) -> Any:
        """Start to sum a tensor [replicas * n] over the replicas; return a handle.

        `wait` returns the slice [n] of the sum that belongs to this replica's place.
        """

    def all_to_all(self, tensor: Tensor, name: str) -> Any:
        """Start to send slice i [n] of a tensor [replicas * n] to replica i; return a handle.

        `wait` returns the slices that this replica has received, as [replicas, n].
        """

    def progress(self) -> None:
        """Let operations in flight continue; called often during backward."""

    def wait(self, handle: Any) -> Tensor:
        """Return the result of an operation once it has ended."""


class HorovodCollectives:
    """Horovod's operations on one of its process sets.

    Args:
        horovod: the initialised Horovod module.
        process_set: Horovod's set of the ranks.
        ranks: of the group, as world ranks in ascending order.
        rank: this rank.
        name: the same on all ranks of the group, and different from every other group's.
    """

    scale = 1.0

    def __init__(
        self, horovod: Any, process_set: Any, ranks: Sequence[int], rank: int, name: str
    ) -> None:
        self.horovod, self.process_set, self.name = horovod, process_set, name
        self.size, self.place = len(ranks), sorted(ranks).index(rank)
        self.sent_bytes = 0.0

    def prepare(self, names: Sequence[str]) -> None:
        """Do nothing: Horovod agrees on the order of operations in every cycle."""

    def all_reduce(self, tensor: Tensor, name: str) -> Any:
        """Start a sum in place."""
        self.sent_bytes += Operation("all_reduce", tensor.nbytes).sent_bytes(self.size)
        return self.horovod.allreduce_async_(
            tensor,
            name=f"{self.name}.{name}",
            op=self.horovod.Sum,
            process_set=self.process_set,
        )

    def all_gather(self, tensor: Tensor, name: str) -> Any:
        """Start to gather the replicas' tensors, each as one row."""
        self.sent_bytes += Operation("all_gather", tensor.nbytes).sent_bytes(self.size)
        return self.horovod.allgather_async(
            tensor[None], name=f"{self.name}.{name}", process_set=self.process_set
        )

    def reduce_scatter(self, tensor: Tensor, name: str) -> Any:
        """Start to sum, each replica for its slice."""
        self.sent_bytes += Operation("reduce_scatter", tensor.nbytes).sent_bytes(self.size)
        return self.horovod.reducescatter_async(
            tensor,
            name=f"{self.name}.{name}",
            op=self.horovod.Sum,
            process_set=self.process_set,
        )

    def all_to_all(self, tensor: Tensor, name: str) -> Any:
        """Start to send each replica its slice."""
        self.sent_bytes += Operation("all_to_all", tensor.nbytes).sent_bytes(self.size)
        return self.horovod.alltoall_async(
            tensor.view(self.size, -1), name=f"{self.name}.{name}", process_set=self.process_set
        )

    def progress(self) -> None:
        """Do nothing: Horovod has a thread for it."""

    def wait(self, handle: Any) -> Tensor:
        """Return the result of an operation; the wait leaves the core to others."""
        wait_until(lambda: self.horovod.poll(handle))
        result = self.horovod.synchronize(handle)
        # That of an all-to-all comes with the lengths of its slices.
        tensor: Tensor = result[0] if isinstance(result, tuple) else result
        return tensor


class Alone:
    """The collective operations of a single replica: each returns what it was given."""

    size, place, sent_bytes, scale = 1, 0, 0.0, 1.0

    def prepare(self, names: Sequence[str]) -> None:
        """Do nothing."""

    def all_reduce(self, tensor: Tensor, name: str) -> Tensor:
        """Return the tensor."""
        return tensor

    def all_gather(self, tensor: Tensor, name: str) -> Tensor:
        """Return the tensor as the only row."""
        return tensor[None]

    def reduce_scatter(self, tensor: Tensor, name: str) -> Tensor:
        """Return the tensor."""
        return tensor

    def all_to_all(self, tensor: Tensor, name: str) -> Tensor:
        """Return the tensor as the only row."""
        return tensor[None]

    def progress(self) -> None:
        """Do nothing."""

    def wait(self, handle: Tensor) -> Tensor:
        """Return the result."""
        return handle


if TYPE_CHECKING:
    from mpi4py import MPI

# MPI's names of the dtypes that it can sum. 16-bit floats are summed by `_sum_of_halves`.
DATATYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
}
HALVES = (torch.float16, torch.bfloat16)


@dataclass
class InFlight:
    """An operation in flight.

    Attributes:
        request: MPI's.
        result: the tensor for the caller, on the device of the argument.
        host: the memory of the result that MPI writes to; `result` itself on a CPU.
        kept: other memory that MPI uses.
    """

    request: "MPI.Request"
    result: Tensor
    host: Tensor
    kept: list[Any] = field(default_factory=list)

    def is_over(self) -> bool:
        """Return whether the result is complete; a call also lets MPI continue its work."""
        return bool(self.request.Test())


class MPICollectives:
    """MPI's non-blocking operations on communicators of the replicas.

    Tensors on a GPU pass through pinned host memory. Runs on GPUs did so with blocking copies; the
    copy back, which the next kernels of the stream wait for, has not run on a GPU.

    Args:
        ranks: of the group, as world ranks. All ranks of the world have called
            `world.communicator_among` with them.
        rank: this rank.
        name: the same on all ranks of the group, and different from every other group's.
    """

    scale = 1.0

    def __init__(self, ranks: Sequence[int], rank: int, name: str) -> None:
        self.ranks, self.name = tuple(sorted(ranks)), name
        self.size, self.place = len(self.ranks), self.ranks.index(rank)
        self.sent_bytes = 0.0
        self._mpi = world.mpi()

    def prepare(self, names: Sequence[str]) -> None:
        """Make the communicators of operations. Collective among the replicas."""
        for name in names:
            self._communicator(name)

    def all_reduce(self, tensor: Tensor, name: str) -> InFlight:
        """Start a sum in place."""
        self.sent_bytes += traffic.Operation("all_reduce", tensor.nbytes).sent_bytes(self.size)
        host = _without_gaps(tensor)
        request = self._communicator(name).Iallreduce(
            self._mpi.IN_PLACE, self._buffer(host), self._sum(host.dtype)
        )
        return InFlight(request, tensor, host)

    def all_gather(self, tensor: Tensor, name: str) -> InFlight:
        """Start to gather the replicas' tensors, each as one row."""
        self.sent_bytes += traffic.Operation("all_gather", tensor.nbytes).sent_bytes(self.size)
        row = _without_gaps(tensor)
        rows = device.new_host(tensor, (self.size, *row.shape))
        request = self._communicator(name).Iallgather(_bytes(row), _bytes(rows))
        result = device.new_target(rows, tensor)
        return InFlight(request, result, rows, [row])

    def reduce_scatter(self, tensor: Tensor, name: str) -> InFlight:
        """Start to sum, each replica for its slice."""
        self.sent_bytes += traffic.Operation("reduce_scatter", tensor.nbytes).sent_bytes(self.size)
        whole, length = _without_gaps(tensor), tensor.numel() // self.size
        part = device.new_host(tensor, (length,))
        request = self._communicator(name).Ireduce_scatter_block(
            self._buffer(whole), self._buffer(part), self._sum(whole.dtype)
        )
        result = device.new_target(part, tensor)
        return InFlight(request, result, part, [whole])

    def all_to_all(self, tensor: Tensor, name: str) -> InFlight:
        """Start to send each replica its slice."""
        self.sent_bytes += traffic.Operation("all_to_all", tensor.nbytes).sent_bytes(self.size)
        whole = _without_gaps(tensor).view(self.size, -1)
        rows = device.new_host(tensor, whole.shape)
        request = self._communicator(name).Ialltoall(_bytes(whole), _bytes(rows))
        result = device.new_target(rows, tensor)
        return InFlight(request, result, rows, [whole])

    def progress(self) -> None:
        """Enter the MPI library, which works on all operations in flight only inside of calls.

        Backward calls this for each gradient. With cnn on 2 ranks that left 0.7 ms of a bucket
        exposed, a thread that made the same call every 0.5 ms left 12 ms, and neither 14 ms.
        """
        communicator = world.current().communicator
        assert communicator is not None
        communicator.Iprobe()  # a question without effect

    def wait(self, handle: InFlight) -> Tensor:
        """Return the result of an operation; the wait leaves the core to others."""
        wait_until(handle.is_over)
        device.stage_in(handle.host, handle.result)
        return handle.result

    def _communicator(self, name: str) -> "MPI.Comm":
        return world.communicator_for(self.ranks, f"{self.name}.{name}")

    def _buffer(self, tensor: Tensor) -> list[Any]:
        """Return the memory of a contiguous tensor as numbers, for mpi4py."""
        name = "UINT16_T" if tensor.dtype in HALVES else DATATYPES[tensor.dtype]
        return [_bytes(tensor)[0], getattr(self._mpi, name)]

    def _sum(self, dtype: torch.dtype) -> "MPI.Op":
        if dtype not in HALVES:
            total: MPI.Op = self._mpi.SUM
            return total
        if dtype not in _HALF_SUMS:
            _HALF_SUMS[dtype] = self._mpi.Op.Create(_sum_of_halves(dtype), commute=True)
        return _HALF_SUMS[dtype]


_HALF_SUMS: "dict[torch.dtype, MPI.Op]" = {}


def _sum_of_halves(dtype: torch.dtype) -> Callable[[Any, Any, Any], None]:
    """Return a function that MPI calls to add 16-bit floats, which it knows as bits only."""

    def add(sent: Any, total: Any, _: Any) -> None:
        torch.frombuffer(total, dtype=dtype).add_(torch.frombuffer(sent, dtype=dtype))

    return add


def _without_gaps(tensor: Tensor) -> Tensor:
    """Return the values of a contiguous tensor in memory of the host."""
    assert tensor.is_contiguous(), "MPI needs memory without gaps"
    return device.stage_out(tensor)


def _bytes(tensor: Tensor) -> list[Any]:
    """Return the memory of a contiguous tensor as bytes, for mpi4py."""
    mpi = world.mpi()
    return [mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), mpi.BYTE]


NO_HIERARCHY = (
    "--allreduce hierarchical needs Horovod, since the all-reduces of --reduce-with mpi do not "
    "block: use --reduce-with horovod (hvdtrain setup installs it), or another --allreduce"
)
WITHOUT_HOROVOD = (
    "Horovod is not installed on all ranks: MPI sums the gradients, as with --reduce-with mpi"
)


def reduction_library(requested: Library | None, world: World) -> Library:
    """Return the library that sums gradients, the same on all ranks. Collective.

    Args:
        requested: None for Horovod if all ranks have it, else MPI.
    """
    if requested is not None:
        return requested
    return "horovod" if all(world.gather(has_horovod())) else "mpi"


def check_algorithm(algorithm: str) -> None:
    """Refuse an algorithm that MPI's non-blocking all-reduce cannot use.

    Raises:
        UsageError: if it is hierarchical, or the library is not Open MPI.
    """
    if algorithm == "auto":
        return
    if algorithm == "hierarchical":
        raise UsageError(NO_HIERARCHY)
    library = worlds.mpi().Get_library_version()
    if "Open MPI" not in library:
        name = library.split(",")[0].split(chr(10))[0].strip()
        raise UsageError(
            f"--allreduce {algorithm} with --reduce-with mpi needs Open MPI, and this is {name}: "
            "use --allreduce auto, or --reduce-with horovod"
        )


def remarks(requested: Library | None, world: World) -> list[str]:
    """Return what a user should know about the library that sums gradients. Collective."""
    if requested is not None or world.size == 1:
        return []
    return [] if reduction_library(requested, world) == "horovod" else [WITHOUT_HOROVOD]


def open_group(library: Library, ranks: tuple[int, ...]) -> None:
    """Make a group of ranks known to the library. Collective: all ranks of the world call it."""
    if library == "horovod":
        worlds.process_set(ranks)
    else:
        worlds.communicator_among(ranks)


def collectives_of(library: Library, ranks: tuple[int, ...], rank: int, name: str) -> Collectives:
    """Return the collective operations of a group that is open."""
    if library == "horovod":
        replicas = worlds.process_set(ranks)
        return HorovodCollectives(worlds.horovod(), replicas, ranks, rank, name)
    return MPICollectives(ranks, rank, name)
