"""Averages of tensors over the replicas of a stage, weighted by samples, in one all-reduce."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from hvdtrain.sync.collectives import Collectives


@dataclass(frozen=True)
class Travelling:
    """Tensors of all replicas that are being averaged.

    Attributes:
        shapes: of the tensors.
        flat: [n], their values and the weight of each replica.
        handle: of the all-reduce.
        averaged: how many of the tensors are averaged; the others are summed.
    """

    shapes: list[torch.Size]
    flat: Tensor
    handle: Any
    averaged: int


@dataclass(frozen=True)
class Agreed:
    """The same bits on all replicas.

    Attributes:
        averages: weighted, in the order and the shapes of the tensors.
        sums: of the tensors that are summed.
        weights: [replicas], of each replica.
    """

    averages: list[Tensor]
    sums: list[Tensor]
    weights: Tensor

    @property
    def first(self) -> int:
        """The place of the first replica with samples."""
        return int(self.weights.nonzero()[0])


class Averager:
    """Averages tensors over replicas.

    This is the only place where what replicas that train apart exchange is put into an all-reduce:
    whatever makes it smaller belongs here.

    Args:
        collectives: among the replicas.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    @torch.no_grad()
    def start(
        self, name: str, tensors: Sequence[Tensor], weight: float, summed: Sequence[Tensor] = ()
    ) -> Travelling:
        """Start to average `tensors`, and to sum `summed`.

        Values travel in the logical order of each tensor, because the memory format of a tensor
        may differ between replicas.

        Args:
            weight: of this replica, such as its number of samples; positive on some replica.
        """
        values, size = [*tensors, *summed], self.collectives.size
        dtype = reduce(
            torch.promote_types, (value.dtype for value in values[1:]), _dtype_of(values)
        )
        count = sum(value.numel() for value in values)
        device = values[0].device if values else None
        flat = torch.zeros(count + size, dtype=dtype, device=device)
        for value, piece in zip(values, _pieces(flat, _shapes(values)), strict=True):
            piece.copy_(value)
        flat[: sum(value.numel() for value in tensors)] *= weight
        flat[count + self.collectives.place] = weight
        handle = self.collectives.all_reduce(flat, name)
        return Travelling(_shapes(values), flat, handle, len(tensors))

    def finish(self, travelling: Travelling) -> Agreed:
        """Wait for the all-reduce, and return its results; they are views of the flat tensor."""
        self.collectives.wait(travelling.handle)
        flat, averaged = travelling.flat, travelling.averaged
        pieces = _pieces(flat, travelling.shapes)
        weights = flat[-self.collectives.size :]
        flat[: sum(piece.numel() for piece in pieces[:averaged])] /= weights.sum()
        return Agreed(pieces[:averaged], pieces[averaged:], weights)


def _dtype_of(values: Sequence[Tensor]) -> torch.dtype:
    return values[0].dtype if values else torch.float32


def _shapes(values: Sequence[Tensor]) -> list[torch.Size]:
    return [value.shape for value in values]


def _pieces(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return views of a flat tensor, one after another."""
    pieces, offset = [], 0
    for shape in shapes:
        pieces.append(flat[offset : offset + shape.numel()].view(shape))
        offset += shape.numel()
    return pieces
