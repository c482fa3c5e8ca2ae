"""Buffers that forwards change, other than batch norm statistics: replicas copy the first one's.

PyTorch's data parallelism broadcasts the first rank's buffers before each forward. Here they are
copied after each step, so that replicas hold the same values whenever a checkpoint is written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hvdtrain.plan.cut import Share


@dataclass(frozen=True)
class States:
    """Access to the changing buffers of a model.

    Attributes:
        find: returns the current buffers by name; a module may have replaced the tensors since
            the last call.
        put: stores new values by name.
    """

    find: Callable[[], Mapping[str, Tensor]]
    put: Callable[[Mapping[str, Tensor]], None]


class CopiedStates:
    """Copies the changing buffers of one replica to all others, to the bit.

    Every replica contributes the bits of its buffers as integers to a Sum; all but one contribute
    zeros.

    Args:
        states: the buffers.
        all_reduce: as in `ReplicatedGradients`.
        wait: as in `ReplicatedGradients`.
    """

    def __init__(
        self,
        states: States,
        all_reduce: Callable[[Tensor, str], Any],
        wait: Callable[[Any], Any],
    ) -> None:
        self.states, self.all_reduce, self.wait = states, all_reduce, wait
        self.flat: Tensor | None = None
        self.handle: Any = None

    def start(self, share: Share) -> None:
        """Start to copy the buffers of the first replica with samples, after all forwards."""
        buffers = list(self.states.find().values())
        if not buffers:
            return
        bits = torch.cat([bytes_of(value) for value in buffers])
        self.flat = functional.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
        if not share.first:
            self.flat.zero_()
        self.handle = self.all_reduce(self.flat, "states")

    def finish(self) -> None:
        """Wait for the copy and store the received buffers."""
        if self.flat is None:
            return
        self.wait(self.handle)
        buffers = self.states.find()
        sizes = [value.nbytes for value in buffers.values()]
        pieces = self.flat.view(torch.uint8)[: sum(sizes)].split(sizes)
        # A clone has aligned memory; a slice of the flat tensor may not.
        self.states.put(
            {
                name: piece.clone().view(value.dtype).view(value.shape)
                for (name, value), piece in zip(buffers.items(), pieces, strict=True)
            }
        )
        self.flat = self.handle = None


def bytes_of(value: Tensor) -> Tensor:
    """Return the bits of a tensor of any dtype as uint8 [bytes]."""
    return value.detach().contiguous().view(-1).view(torch.uint8)
