"""Collective operations among the replicas of a stage: by Horovod, MPI or torch.distributed.

Every operation starts with a call that returns at once, and ends with `wait`. All replicas of a
group start the same operations in the same order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, distributed

from hvdtrain import device as devices
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


# Returns the operations for a purpose, whose names differ from those for all others.
Group = Callable[[str], Collectives]


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
        is_over: returns whether the result is complete; a call also lets MPI continue its work.
        result: the tensor for the caller, on the device of the argument.
        host: the memory of the result that the library writes to; `result` itself on a CPU.
        kept: all else that the library uses.
    """

    is_over: Callable[[], bool]
    result: Tensor
    host: Tensor
    kept: list[Any] = field(default_factory=list)


class MPICollectives:
    """MPI's non-blocking operations on a communicator of the replicas.

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
        self.size, self.place = len(ranks), sorted(ranks).index(rank)
        self.sent_bytes = 0.0
        self._mpi = worlds.mpi()
        self._communicator = worlds.communicator_for(tuple(ranks), name)

    def all_reduce(self, tensor: Tensor, name: str) -> InFlight:
        """Start a sum in place."""
        self.sent_bytes += traffic.Operation("all_reduce", tensor.nbytes).sent_bytes(self.size)
        host = _without_gaps(tensor)
        request = self._communicator.Iallreduce(
            self._mpi.IN_PLACE, self._buffer(host), self._sum(host.dtype)
        )
        return InFlight(request.Test, tensor, host)

    def all_gather(self, tensor: Tensor, name: str) -> InFlight:
        """Start to gather the replicas' tensors, each as one row."""
        self.sent_bytes += traffic.Operation("all_gather", tensor.nbytes).sent_bytes(self.size)
        row = _without_gaps(tensor)
        rows = devices.new_host(tensor, (self.size, *row.shape))
        request = self._communicator.Iallgather(_bytes(row), _bytes(rows))
        result = devices.new_target(rows, tensor)
        return InFlight(request.Test, result, rows, [row])

    def reduce_scatter(self, tensor: Tensor, name: str) -> InFlight:
        """Start to sum, each replica for its slice."""
        self.sent_bytes += traffic.Operation("reduce_scatter", tensor.nbytes).sent_bytes(self.size)
        whole, length = _without_gaps(tensor), tensor.numel() // self.size
        part = devices.new_host(tensor, (length,))
        request = self._communicator.Ireduce_scatter_block(
            self._buffer(whole), self._buffer(part), self._sum(whole.dtype)
        )
        result = devices.new_target(part, tensor)
        return InFlight(request.Test, result, part, [whole])

    def all_to_all(self, tensor: Tensor, name: str) -> InFlight:
        """Start to send each replica its slice."""
        self.sent_bytes += traffic.Operation("all_to_all", tensor.nbytes).sent_bytes(self.size)
        whole = _without_gaps(tensor).view(self.size, -1)
        rows = devices.new_host(tensor, whole.shape)
        request = self._communicator.Ialltoall(_bytes(whole), _bytes(rows))
        result = devices.new_target(rows, tensor)
        return InFlight(request.Test, result, rows, [whole])

    def progress(self) -> None:
        """Enter the MPI library, which works on all operations in flight only inside of calls.

        Backward calls this for each gradient. With cnn on 2 ranks that left 0.7 ms of a bucket
        exposed, a thread that made the same call every 0.5 ms left 12 ms, and neither 14 ms.
        """
        communicator = worlds.current().communicator
        assert communicator is not None
        communicator.Iprobe()  # a question without effect

    def wait(self, handle: InFlight) -> Tensor:
        """Return the result of an operation; the wait leaves the core to others."""
        wait_until(handle.is_over)
        devices.stage_in(handle.host, handle.result)
        return handle.result

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
    return devices.stage_out(tensor)


def _bytes(tensor: Tensor) -> list[Any]:
    """Return the memory of a contiguous tensor as bytes, for mpi4py."""
    mpi = worlds.mpi()
    return [mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), mpi.BYTE]


NCCL, GLOO = "nccl", "gloo"


class TorchCollectives:
    """Operations of torch.distributed on one of its process groups.

    NCCL takes tensors where they are, gloo in memory of the host. NCCL has not run here yet.

    Args:
        group: of the ranks, as `world.torch_group` returns it.
    """

    scale = 1.0

    def __init__(self, group: Any) -> None:
        self.group, self.size, self.place = group, group.size(), group.rank()
        self.sent_bytes, self._on_host = 0.0, group.name() == GLOO

    def all_reduce(self, tensor: Tensor, name: str) -> InFlight:
        """Start a sum in place."""
        self.sent_bytes += Operation("all_reduce", tensor.nbytes).sent_bytes(self.size)
        values = self._values(tensor)
        work = distributed.all_reduce(values, group=self.group, async_op=True)
        return InFlight(work.is_completed, tensor, values, [work])

    def all_gather(self, tensor: Tensor, name: str) -> InFlight:
        """Start to gather the replicas' tensors, each as one row."""
        self.sent_bytes += Operation("all_gather", tensor.nbytes).sent_bytes(self.size)
        row = self._values(tensor)
        rows = self._empty(tensor, (self.size, *row.shape))
        parts = list(_as_bytes(rows).view(self.size, -1))
        work = distributed.all_gather(
            parts, _as_bytes(row).view(-1), group=self.group, async_op=True
        )
        return self._in_flight(work, rows, tensor, row)

    def reduce_scatter(self, tensor: Tensor, name: str) -> InFlight:
        """Start to sum, each replica for its slice."""
        whole, length = self._values(tensor), tensor.numel() // self.size
        if self._on_host:  # gloo's own sums all slices, too, and does not tell when it is over
            self.sent_bytes += Operation("all_reduce", tensor.nbytes).sent_bytes(self.size)
            whole = whole.clone().view(-1)
            work = distributed.all_reduce(whole, group=self.group, async_op=True)
            return self._in_flight(work, whole[self.place * length :][:length], tensor, whole)
        self.sent_bytes += Operation("reduce_scatter", tensor.nbytes).sent_bytes(self.size)
        part = self._empty(tensor, (length,))
        parts = list(whole.view(self.size, -1))
        work = distributed.reduce_scatter(part, parts, group=self.group, async_op=True)
        return self._in_flight(work, part, tensor, whole)

    def all_to_all(self, tensor: Tensor, name: str) -> InFlight:
        """Start to send each replica its slice."""
        self.sent_bytes += Operation("all_to_all", tensor.nbytes).sent_bytes(self.size)
        whole = self._values(tensor).view(self.size, -1)
        rows = self._empty(tensor, whole.shape)
        work = distributed.all_to_all_single(
            _as_bytes(rows), _as_bytes(whole), group=self.group, async_op=True
        )
        return self._in_flight(work, rows, tensor, whole)

    def progress(self) -> None:
        """Do nothing: both libraries have threads, or the GPU, for it."""

    def wait(self, handle: InFlight) -> Tensor:
        """Return the result of an operation.

        The wait for gloo leaves the core to others; for NCCL only the stream of the GPU waits.
        """
        if self._on_host:
            wait_until(handle.is_over)
        handle.kept[0].wait()  # raises what went wrong
        if self._on_host:
            devices.stage_in(handle.host, handle.result)
        return handle.result

    def _values(self, tensor: Tensor) -> Tensor:
        return _without_gaps(tensor) if self._on_host else tensor

    def _empty(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        return devices.new_host(like, shape) if self._on_host else like.new_empty(shape)

    def _in_flight(self, work: Any, host: Tensor, like: Tensor, sent: Tensor) -> InFlight:
        result = devices.new_target(host, like) if self._on_host else host
        return InFlight(work.is_completed, result, host, [work, sent])


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor as bytes: gloo copies any dtype as bytes."""
    return tensor.view(torch.uint8)


NO_HIERARCHY = (
    "--allreduce hierarchical needs Horovod, since the all-reduces of --reduce-with mpi do not "
    "block: use --reduce-with horovod (hvdtrain setup installs it), or another --allreduce"
)
WITHOUT_HOROVOD = "Horovod is not installed on all ranks"
SUMMED_BY: Mapping[Library, str] = {
    "mpi": "MPI sums the gradients, as with --reduce-with mpi",
    "torch": "torch.distributed sums the gradients, as with --reduce-with torch",
}


def reduction_library(requested: Library | None, world: World, device: torch.device) -> Library:
    """Return the library that sums gradients, the same on all ranks. Collective.

    Args:
        requested: None for Horovod if all ranks have it; else MPI, but on GPUs torch.distributed.
        device: of this rank's gradients.
    """
    if not world.has_mpi:
        return "torch"
    if requested is not None:
        return requested
    if not why_not_horovod(device, world):
        return "horovod"
    return "torch" if devices.is_gpu(device) else "mpi"


def why_not_horovod(device: torch.device, world: World) -> str:
    """Return why Horovod cannot sum gradients, the same on all ranks, or nothing. Collective.

    Without NCCL its sum of tensors on a GPU would never end, and NCCL accepts one rank per GPU.
    """
    has_it, has_nccl, has_threads = has_horovod(), True, world.has_multiple_threads
    if has_it and devices.is_gpu(device):
        has_nccl = bool(worlds.horovod_module("torch", world.size).nccl_built())
    installed, with_threads, with_nccl = map(
        all, zip(*world.gather((has_it, has_threads, has_nccl)), strict=True)
    )
    if not installed:
        return WITHOUT_HOROVOD
    if not with_threads:
        return worlds.ONE_THREAD
    if not with_nccl:
        return "Horovod is built without NCCL, so it cannot sum on GPUs"
    if shared := _on_one_gpu(device, world):
        return f"ranks {' and '.join(map(str, shared))} share a GPU, which NCCL does not accept"
    return ""


def _on_one_gpu(device: torch.device, world: World) -> list[int]:
    """Return the first ranks that share a GPU, which NCCL does not accept. Collective."""
    return devices.ranks_on_one_gpu(world.gather(devices.place_of(device)))


def check_horovod(device: torch.device, world: World) -> None:
    """Refuse devices on which Horovod cannot sum. Collective.

    Raises:
        UsageError: with the reason, the same on all ranks.
    """
    if reason := why_not_horovod(device, world):
        cure = "run hvdtrain setup" + (" --cuda" if devices.is_gpu(device) else "")
        raise UsageError(f"{reason}: {cure}, or use --reduce-with torch")


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


def remarks(requested: Library | None, world: World, device: torch.device) -> list[str]:
    """Return what a user should know about the library that sums gradients. Collective."""
    if requested is not None or world.size == 1 or not world.has_mpi:
        return []
    library = reduction_library(requested, world, device)
    if library == "horovod":
        return []
    return [f"{why_not_horovod(device, world)}: {SUMMED_BY[library]}"]


def open_group(
    library: Library, ranks: tuple[int, ...], world: World, device: torch.device, name: str
) -> Group:
    """Make a group of ranks known to the library. Collective: all ranks of the world call it.

    Args:
        name: the same on all ranks of the group, and different from every other group's.

    Returns:
        The operations of the group; ranks outside of it do not call it.
    """
    if library == "horovod":
        members = worlds.process_set(ranks)

        def by_horovod(purpose: str) -> Collectives:
            used = f"{name}.{purpose}"
            return HorovodCollectives(worlds.horovod(), members, ranks, world.rank, used)

        return by_horovod
    if library == "torch":
        is_alone = not _on_one_gpu(device, world)
        has_nccl = devices.is_gpu(device) and is_alone and distributed.is_nccl_available()
        group = worlds.torch_group(ranks, name, NCCL if has_nccl else GLOO)
        return lambda purpose: TorchCollectives(group)
    worlds.communicator_among(ranks)
    return lambda purpose: MPICollectives(ranks, world.rank, f"{name}.{purpose}")
