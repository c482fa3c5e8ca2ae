"""Buffers that forwards change, beside batch norms' statistics: replicas keep the first one's.

As in PyTorch's own data parallelism, where each forward begins with the first rank's buffers; here
they are handed on after a step, so that replicas hold the same whenever a checkpoint is made.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hvdtrain.parallel.cut import Share


class CopiedStates:
    """The changing buffers of a replica, summed as integers of which all but one's are zero.

    Args:
        find: the buffers by name as they are now: a module may put other ones in their place.
        all_reduce, wait: as in `ReplicatedGradients`.
    """

    def __init__(
        self,
        find: Callable[[], Mapping[str, Tensor]],
        all_reduce: Callable[[Tensor, str], Any],
        wait: Callable[[Any], Any],
    ) -> None:
        self.find, self.all_reduce, self.wait = find, all_reduce, wait
        self.flat: Tensor | None = None
        self.handle: Any = None

    def start(self, share: Share) -> None:
        """Hand on those of the first replica that had samples; the forwards are over."""
        found = list(self.find().values())
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
        found = list(self.find().values())
        sizes = [value.nbytes for value in found]
        pieces = self.flat.view(torch.uint8)[: sum(sizes)].split(sizes)
        with torch.no_grad():
            for value, piece in zip(found, pieces, strict=True):
                # Aligned memory of its own, which a part of a longer tensor has not.
                value.copy_(piece.clone().view(value.dtype).view(value.shape))
        self.flat = self.handle = None


def bytes_of(value: Tensor) -> Tensor:
    """The bits of a tensor of any kind: uint8 [bytes]."""
    return value.detach().contiguous().view(-1).view(torch.uint8)
