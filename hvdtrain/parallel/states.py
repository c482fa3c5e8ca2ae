"""Buffers that forwards change, beside batch norms' statistics: replicas keep the first one's.

As in PyTorch's own data parallelism, where each forward begins with the first rank's buffers; here
they are handed on after a step, so that replicas hold the same whenever a checkpoint is made.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hvdtrain.parallel.cut import Share


@dataclass(frozen=True)
class States:
    """How the changing buffers of a model are reached.

    Attributes:
        find: them by name as they are now: a module may put other ones in their place.
        put: takes new values, by name.
    """

    find: Callable[[], Mapping[str, Tensor]]
    put: Callable[[Mapping[str, Tensor]], None]


class CopiedStates:
    """The changing buffers of a replica, summed as integers of which all but one's are zero.

    Args:
        states: the buffers.
        all_reduce, wait: as in `ReplicatedGradients`.
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
        """Hand on those of the first replica that had samples; the forwards are over."""
        found = list(self.states.find().values())
        if not found:
            return
        bits = torch.cat([bytes_of(value) for value in found])
        self.flat = functional.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
        if not share.first:
            self.flat.zero_()
        self.handle = self.all_reduce(self.flat, "states")

    def finish(self) -> None:
        """Take them over."""
        if self.flat is None:
            return
        self.wait(self.handle)
        found = self.states.find()
        sizes = [value.nbytes for value in found.values()]
        pieces = self.flat.view(torch.uint8)[: sum(sizes)].split(sizes)
        # Each in aligned memory of its own, which a part of a longer tensor has not.
        self.states.put(
            {
                name: piece.clone().view(value.dtype).view(value.shape)
                for (name, value), piece in zip(found.items(), pieces, strict=True)
            }
        )
        self.flat = self.handle = None


def bytes_of(value: Tensor) -> Tensor:
    """The bits of a tensor of any kind: uint8 [bytes]."""
    return value.detach().contiguous().view(-1).view(torch.uint8)
