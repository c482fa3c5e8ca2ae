"""Copies of buffers that forwards change, from one replica to the others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hvdtrain.plan.cut import Share
from hvdtrain.sync.collectives import Collectives


@dataclass(frozen=True)
class States:
    """Access to the buffers of a model that forwards change, other than batch norm statistics.

    Attributes:
        find: returns the current buffers by name; a module may have replaced the tensors since
            the last call.
        put: stores new values by name.
    """

    find: Callable[[], Mapping[str, Tensor]]
    put: Callable[[Mapping[str, Tensor]], None]


class CopiedStates:
    """Copies the changing buffers of one replica to all others, to the bit.

    PyTorch's data parallelism broadcasts the first rank's buffers before each forward. Here they
    are copied after each step, so that replicas hold the same values whenever a checkpoint is
    written. Every replica contributes the bits of its buffers as integers to a Sum; all but one
    contribute zeros.

    Args:
        states: the buffers.
        collectives: among the replicas.
    """

    def __init__(self, states: States, collectives: Collectives) -> None:
        self.states, self.collectives = states, collectives
        collectives.prepare(["states"])
        self._copying: tuple[Tensor, Any] | None = None  # the bits, and the reduction in flight

    def start(self, share: Share) -> None:
        """Start to copy the buffers of the first replica with samples, after all forwards."""
        buffers = list(self.states.find().values())
        if not buffers:
            return
        bits = torch.cat([bytes_of(value) for value in buffers])
        flat = functional.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
        if not share.first:
            flat.zero_()
        self._copying = flat, self.collectives.all_reduce(flat, "states")

    def finish(self) -> None:
        """Wait for the copy and store the received buffers."""
        if self._copying is None:
            return
        (flat, handle), self._copying = self._copying, None
        self.collectives.wait(handle)
        buffers = self.states.find()
        sizes = [value.nbytes for value in buffers.values()]
        pieces = flat.view(torch.uint8)[: sum(sizes)].split(sizes)
        # A clone has aligned memory; a slice of the flat tensor may not.
        self.states.put(
            {
                name: piece.clone().view(value.dtype).view(value.shape)
                for (name, value), piece in zip(buffers.items(), pieces, strict=True)
            }
        )


def bytes_of(value: Tensor) -> Tensor:
    """Return the bits of a tensor of any dtype as uint8 [bytes]."""
    return value.detach().contiguous().view(-1).view(torch.uint8)
