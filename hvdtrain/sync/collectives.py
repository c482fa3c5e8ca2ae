"""Collective operations among the replicas of a stage, on flat tensors: over what replicas agree.

Every operation starts with a call that returns at once, and ends with `wait`. All replicas start
the same operations by name, after `prepare` in any order.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from hvdtrain.host.process import wait_until
from hvdtrain.plan.traffic import Operation


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
