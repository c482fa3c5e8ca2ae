"""Slices of a model: which server holds which parameters, and their values in one flat tensor."""

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn


def assign(sizes: Sequence[int], servers: int) -> list[int]:
    """Return the server, from 0, of each of `sizes`: whole parameters, balanced by bytes.

    The largest ones first, each to the server with the fewest bytes so far (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969): no server has more than 4/3 of the best possible
    maximum. If there are at least as many sizes as servers, each server has one.
    """
    loads, owners = [0] * servers, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owners[index] = min(range(servers), key=lambda server: (loads[server], server))
        loads[owners[index]] += max(1, sizes[index])
    return owners


def slices_of(parameters: Mapping[str, nn.Parameter], servers: int) -> list["Slice"]:
    """Return the slice of each server."""
    owners = assign([value.nbytes for value in parameters.values()], servers)
    named = list(zip(owners, parameters.items(), strict=True))
    return [Slice(dict(item for owner, item in named if owner == n)) for n in range(servers)]


class Slice:
    """Some parameters, whose values travel as one flat tensor on the CPU.

    Values travel in the logical order of each parameter, because the memory format of a parameter
    may differ between ranks.

    Args:
        parameters: by name; at least one.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.named, self.parameters = dict(parameters), list(parameters.values())
        self.length = sum(value.numel() for value in self.parameters)
        dtypes = [value.dtype for value in self.parameters]
        self.dtype = reduce(torch.promote_types, dtypes)

    def empty(self) -> Tensor:
        """Return a flat tensor [length] with any values."""
        return torch.empty(self.length, dtype=self.dtype)

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat tensor in the shapes of the parameters."""
        flats = flat.split([value.numel() for value in self.parameters])
        return [
            piece.view(value.shape) for piece, value in zip(flats, self.parameters, strict=True)
        ]

    @torch.no_grad()
    def copy_gradients(self, flat: Tensor, scale: float) -> None:
        """Copy the gradients into a flat tensor, times `scale`; a missing one is zero."""
        for piece, value in zip(self.pieces(flat), self.parameters, strict=True):
            if value.grad is None:
                piece.zero_()
            else:
                piece.copy_(value.grad)
        if scale != 1:
            flat *= scale

    @torch.no_grad()
    def add_gradients(self, flat: Tensor) -> None:
        """Add a flat tensor to the gradients, which exist."""
        for piece, value in zip(self.pieces(flat), self.parameters, strict=True):
            assert value.grad is not None
            value.grad += piece.to(value.device)

    @torch.no_grad()
    def copy_weights(self) -> Tensor:
        """Return a flat copy of the parameters."""
        flat = self.empty()
        for piece, value in zip(self.pieces(flat), self.parameters, strict=True):
            piece.copy_(value)
        return flat

    @torch.no_grad()
    def put_weights(self, flat: Tensor) -> None:
        """Copy a flat tensor into the parameters."""
        for piece, value in zip(self.pieces(flat), self.parameters, strict=True):
            value.copy_(piece)
