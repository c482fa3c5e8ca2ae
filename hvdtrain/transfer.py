"""Objects that one rank sends to others: their tensors travel as they are in memory, in pieces.

MPI counts to 2**31 - 1 bytes, and mpi4py sends the pickle of an object as one message. Here only
the structure of an object is pickled; its arrays and tensors are sent from their own memory.
"""

import io
import pickle
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.host.process import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

PIECE = 2**30  # bytes of a message


class Parcel(NamedTuple):
    """Sizes of the memories that follow, in bytes: the structure of an object, and its tensors."""

    sizes: list[int]

    def memories(self) -> list[memoryview]:
        """Return new memory of these sizes."""
        return [memoryview(bytearray(size)) for size in self.sizes]


def broadcast(communicator: "MPI.Comm", value: Any, root: int) -> Any:
    """Return the `value` of rank `root` on all ranks. Collective."""
    is_root = communicator.rank == root
    memories = _pack(value) if is_root else []
    parcel = communicator.bcast(Parcel([len(memory) for memory in memories]), root)
    memories = memories if is_root else parcel.memories()
    for memory in memories:
        broadcast_memory(communicator, memory, root)
    return value if is_root else _unpack(memories)


def broadcast_memory(communicator: "MPI.Comm", memory: memoryview, root: int) -> None:
    """Copy bytes of rank `root` into the memory of all ranks. Collective."""
    for piece in _pieces(memory):
        wait_until(communicator.Ibcast(piece, root).Test)


def send(communicator: "MPI.Comm", value: Any, receiver: int, tag: int) -> "list[MPI.Request]":
    """Start to send `value`, whose tensors must not change before the requests are over."""
    memories = _pack(value)
    parcel = Parcel([len(memory) for memory in memories])
    return [
        communicator.isend(parcel, receiver, tag),
        *(communicator.Isend(p, receiver, tag) for memory in memories for p in _pieces(memory)),
    ]


def receive(communicator: "MPI.Comm", sender: int, tag: int) -> Any:
    """Return what rank `sender` sends by `send`."""
    message = wait_until(lambda: communicator.improbe(sender, tag))
    assert message is not None
    memories = message.recv().memories()
    for memory in memories:
        for piece in _pieces(memory):
            wait_until(communicator.Irecv(piece, sender, tag).Test)
    return _unpack(memories)


def _pieces(memory: memoryview) -> list[memoryview]:
    return [memory[start : start + PIECE] for start in range(0, len(memory), PIECE)]


def _pack(value: Any) -> list[memoryview]:
    """Return the structure of an object, and the memory of each of its tensors."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return [file.getbuffer(), *(buffer.raw() for buffer in buffers)]


def _unpack(memories: Sequence[memoryview]) -> Any:
    return pickle.loads(memories[0], buffers=memories[1:])


class _Pickler(pickle.Pickler):
    """Leaves the memory of PyTorch's tensors out of a pickle, as `pickle` does for NumPy's."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or not value.numel():
            return NotImplemented
        if value.layout != torch.strided or value.is_quantized:
            return NotImplemented
        # In the order of memory: dense tensors keep their strides, and are not copied.
        order = sorted(range(value.dim()), key=lambda place: -value.stride(place))
        dense = value.detach().cpu().resolve_conj().resolve_neg().permute(order).contiguous()
        memory = pickle.PickleBuffer(dense.view(-1).view(torch.uint8).numpy())
        return _tensor, (memory, value.dtype, tuple(dense.shape), order)


def _tensor(memory: memoryview, dtype: Any, shape: tuple[int, ...], order: list[int]) -> Any:
    import torch

    places = sorted(range(len(order)), key=order.__getitem__)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape).permute(places)
