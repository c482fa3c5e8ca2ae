"""The state of replicas: what checkpoints and servers hold, its copies and its checksums."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvdtrain.plan.cut import Share
from hvdtrain.sync.collectives import Collectives


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


MODEL, OPTIMIZER = "model/", "optimizer/"
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


class Kept(Protocol):
    """Whatever has such a state; by default it has none.

    The names of the tensors end in the name of a parameter, so that those of two stages differ.
    """

    def saved(self) -> dict[str, Tensor]:
        """Return the tensors that this rank writes to a checkpoint, by name; not copies."""
        return {}

    def wanted(self, shapes: Shapes) -> frozenset[str]:
        """Return the names of the tensors that this rank reads.

        Args:
            shapes: of all such tensors of the checkpoint, by name.
        """
        return frozenset()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with the tensors that `wanted` has named."""
        return


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


@dataclass(frozen=True)
class Replica:
    """Weights, buffers and optimizer of a stage on this rank.

    Attributes:
        parameters: trainable, by name.
        statistics: running statistics of batch norms, by name.
        states: the other buffers that forwards change; its `put` accepts any tensor of the stage.
        optimizer: None if there are no parameters.
        complete: creates the state of parameters that the optimizer has not updated yet, as zeros.
    """

    parameters: Mapping[str, nn.Parameter]
    statistics: Mapping[str, Tensor]
    states: States
    optimizer: torch.optim.Optimizer | None
    complete: Callable[[], None] = lambda: None

    @property
    def averaged(self) -> dict[str, Tensor]:
        """Statistics that replicas average: means and variances."""
        return {k: value for k, value in self.statistics.items() if value.is_floating_point()}

    @property
    def copied(self) -> States:
        """Buffers that replicas take from the first one with samples: counters, and others."""
        counters = {k: value for k, value in self.statistics.items() if k not in self.averaged}
        return States(lambda: {**counters, **self.states.find()}, self.states.put)

    def moments(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors by their names in a checkpoint, with step counters."""
        if self.optimizer is None:
            return {}
        self.complete()
        return {
            f"{OPTIMIZER}{name}/{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def weights(self) -> dict[str, Tensor]:
        """Return all tensors that training changes, by their names in a checkpoint."""
        tensors = {**self.parameters, **self.statistics, **self.states.find()}
        return {f"{MODEL}{name}": tensor.detach() for name, tensor in tensors.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors with the names of `weights` and `moments` into this replica."""
        self.states.put(
            {
                name.removeprefix(MODEL): value
                for name, value in tensors.items()
                if name.startswith(MODEL)
            }
        )
        for name, value in self.moments().items():
            if name in tensors:
                value.copy_(tensors[name])


ROW = 1024


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """Return a number that depends on every bit of the tensors and on their places.

    The memory is read as integers of 64 bits; the result is their sum modulo 2**64, each weighted
    by its place, computed on the tensors' device. Odd weights ensure that a change of a single
    integer changes the sum. It is not a hash: several changes may cancel out. It depends on the
    memory layout.
    """
    sums = [_weighted_sum(_bytes(tensor.detach())) for tensor in tensors if tensor.numel()]
    if not sums:
        return 0
    device = sums[0].device  # of most: a few tensors may be elsewhere
    whole = torch.stack([value.to(device) for value in sums])
    return int((whole * _places(0, len(sums), device)).sum())


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as uint8 [n], in the order of memory if the tensor is dense."""
    strides = tensor.stride()
    flat = tensor.permute(sorted(range(tensor.dim()), key=lambda place: -strides[place]))
    return flat.contiguous().view(-1).view(torch.uint8)


def _weighted_sum(memory: Tensor) -> Tensor:
    """Return the sum over i of words[i] x (2 i + 1) as int64; the last, partial word as bytes.

    Sums of rows and columns need two reads of the memory and no temporary of its size.
    """
    count = len(memory) // 8
    whole = memory[: 8 * count]
    words = (whole if whole.storage_offset() % 8 == 0 else whole.clone()).view(torch.int64)
    rows = count // ROW
    table = words[: rows * ROW].view(rows, ROW)
    rest = torch.cat([words[rows * ROW :], memory[8 * count :].long()])
    total = (rest * _places(rows * ROW, rows * ROW + len(rest), words.device)).sum()
    if rows:
        by_row = table.sum(1) * _places(0, rows * ROW, words.device, ROW)
        by_column = table.sum(0) * torch.arange(0, 2 * ROW, 2, device=words.device)
        total = total + by_row.sum() + by_column.sum()
    return total


def _places(start: int, stop: int, device: torch.device, step: int = 1) -> Tensor:
    return torch.arange(2 * start + 1, 2 * stop + 1, 2 * step, device=device)


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of dtype, shape and bits."""
    content = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    content.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()
