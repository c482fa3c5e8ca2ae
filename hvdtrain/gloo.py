"""The ranks of torchrun, and what they tell one another, by torch.distributed's gloo.

`Communicator` has the operations of mpi4py that data-parallel training needs, so that the rest of
hvdtrain does not know which of them connects its ranks.
"""

import pickle
from collections.abc import Hashable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

NO_LIMIT = timedelta(days=365)  # a watchdog judges hangs


def start() -> "Communicator":
    """Join the ranks whose address torchrun, or another launcher of PyTorch, has set.

    They stay joined until the process ends: the launcher's store keeps the addresses of a first
    time, at which a second one would wait without end.
    """
    if not distributed.is_initialized():  # by the user's program, or an earlier run
        distributed.init_process_group("gloo", timeout=NO_LIMIT)
    return Communicator(tuple(range(distributed.get_world_size())))


class Request:
    """An operation in flight.

    Args:
        work: of torch.distributed.
        kept: memory that it uses.
        waits: whether `Test` waits: gloo does not tell whether a message has been sent.
    """

    def __init__(self, work: Any, *kept: Any, waits: bool = False) -> None:
        self.work, self.kept, self.waits = work, kept, waits

    def Test(self) -> bool:
        """Return whether the operation is complete."""
        if not (self.waits or self.work.is_completed()):
            return False
        self.work.wait()  # raises what went wrong
        return True


class Requests:
    """Several operations as one."""

    def __init__(self, *requests: Request) -> None:
        self.requests = requests

    def Test(self) -> bool:
        """Return whether all are complete."""
        return all(request.Test() for request in self.requests)


class Message:
    """A message that `recv` receives: an object."""

    def __init__(self, communicator: "Communicator", source: int, tag: int) -> None:
        self.communicator, self.source, self.tag = communicator, source, tag

    def recv(self) -> Any:
        """Wait for the object."""
        size = np.zeros(1, np.int64)
        self.communicator.Irecv(size, self.source, self.tag).Test()
        memory = bytearray(int(size[0]))
        self.communicator.Irecv(memory, self.source, self.tag).Test()
        return pickle.loads(memory)


class Communicator:
    """Operations among ranks, named and used as those of mpi4py's communicators.

    Args:
        ranks: of the world, in the order of the communicator. All ranks of the world make the
            same communicators, in the same order.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks, self.size = ranks, len(ranks)
        self.group = distributed.new_group(list(ranks), NO_LIMIT, "gloo")
        # The group has its ranks in ascending order; these are their places here.
        self._places = [ranks.index(rank) for rank in sorted(ranks)]
        me = distributed.get_rank()
        self.rank = ranks.index(me) if me in ranks else -1

    def Dup(self) -> "Communicator":
        """Return one of the same ranks, whose operations do not meet these."""
        return Communicator(self.ranks)

    def Free(self) -> None:
        """Do nothing: all groups end together."""

    def Split(self, color: Hashable, key: int = 0) -> "Communicator":
        """Return the communicator of the ranks with this rank's color, in the order of keys."""
        members: dict[Hashable, list[tuple[int, int]]] = {}
        for rank, (its_color, its_key) in zip(
            self.ranks, self.allgather((color, key)), strict=True
        ):
            members.setdefault(its_color, []).append((its_key, rank))
        made = {
            one: Communicator(tuple(rank for _, rank in sorted(pairs)))
            for one, pairs in members.items()
        }
        return made[color]

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's object, in rank order."""
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.group)
        return [values[self._places.index(place)] for place in range(self.size)]

    def bcast(self, value: Any, root: int) -> Any:
        """Return the object of rank `root`."""
        values = [value]
        distributed.broadcast_object_list(values, self.ranks[root], group=self.group)
        return values[0]

    def Ibarrier(self) -> Request:
        """Start to wait for all ranks."""
        return Request(distributed.barrier(self.group, async_op=True))

    def Ibcast(self, memory: Any, root: int) -> Request:
        """Start to copy the memory of rank `root` into that of all ranks."""
        memory = _as_bytes(memory)
        work = distributed.broadcast(memory, self.ranks[root], group=self.group, async_op=True)
        return Request(work, memory)

    def Iallgather(self, sent: Any, received: Any) -> Request:
        """Start to gather the memory of all ranks, in rank order."""
        row, rows = _as_bytes(sent), _as_bytes(received)
        parts = [rows.view(self.size, -1)[place] for place in self._places]
        work = distributed.all_gather(parts, row, group=self.group, async_op=True)
        return Request(work, row, rows)

    def Iallreduce(self, sent: np.ndarray, total: np.ndarray) -> Request:
        """Start to sum arrays over the ranks."""
        total[...] = sent
        work = distributed.all_reduce(torch.from_numpy(total), group=self.group, async_op=True)
        return Request(work, total)

    def Isend(self, memory: Any, receiver: int, tag: int) -> Request:
        """Start to send memory."""
        memory = _as_bytes(memory)
        work = distributed.isend(memory, self.ranks[receiver], self.group, tag)
        return Request(work, memory, waits=True)

    def Irecv(self, memory: Any, sender: int, tag: int) -> Request:
        """Start to receive into memory."""
        memory = _as_bytes(memory)
        work = distributed.irecv(memory, self.ranks[sender], self.group, tag)
        return Request(work, memory, waits=True)

    def isend(self, value: Any, receiver: int, tag: int) -> Requests:
        """Start to send an object."""
        memory = bytearray(pickle.dumps(value))
        size = np.array([len(memory)], np.int64)
        return Requests(self.Isend(size, receiver, tag), self.Isend(memory, receiver, tag))

    def improbe(self, source: int, tag: int) -> Message:
        """Return the next message of a rank, which need not have arrived yet."""
        return Message(self, source, tag)

    def send(self, value: Any, receiver: int) -> None:
        """Send an object."""
        self.isend(value, receiver, 0).Test()

    def recv(self, source: int) -> Any:
        """Return the next object of a rank."""
        return Message(self, source, 0).recv()


def _as_bytes(memory: Any) -> Tensor:
    """Return memory, a buffer or an array, as bytes of a tensor."""
    array = np.frombuffer(memory, np.uint8) if not isinstance(memory, np.ndarray) else memory
    return torch.from_numpy(array.reshape(-1).view(np.uint8))
