"""Boundaries between stages: activations and gradients, joined from and split for ranks.

Rows that come from another rank arrive in the buffer in which they are used; rows of the same
rank's other stage are taken as they are. A buffer returns to its pool once nothing reads it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.parallel.exchange import Exchange, Receipt
from hvdtrain.plan.actions import boundary
from hvdtrain.plan.program import Task


@dataclass(frozen=True)
class Form:
    """Shape, dtype and memory format of one sample at a boundary between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, batch: Tensor) -> "Form":
        """Return the form of the samples of `batch`, [n, ...].

        n must be above 1: the strides of a single sample do not show its memory format.
        """
        is_last = batch.dim() == 4 and batch.is_contiguous(memory_format=torch.channels_last)
        return cls(tuple(batch.shape[1:]), batch.dtype, is_last and not batch.is_contiguous())

    @property
    def row_bytes(self) -> int:
        """Bytes per sample."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def empty(self, rows: int, device: torch.device) -> Tensor:
        """Return a new tensor [rows, *shape] in which each sample is contiguous."""
        with torch.inference_mode(False):  # the buffer is reused outside of inference mode
            return torch.empty(
                (rows, *self.shape), dtype=self.dtype, device=device, memory_format=self._format
            )

    def arranged(self, batch: Tensor) -> Tensor:
        """Return `batch` in this memory format; copy it only if needed.

        Raises:
            RuntimeError: if the shape or dtype differs, because receivers allocate by the form.
        """
        if batch.shape[1:] != self.shape or batch.dtype != self.dtype:
            raise RuntimeError(
                f"a component emitted samples of {tuple(batch.shape[1:])} {batch.dtype} instead "
                f"of {self.shape} {self.dtype}: it must emit the same shape and dtype each time"
            )
        return batch.contiguous(memory_format=self._format)

    @property
    def _format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format


class Boundaries:
    """One rank's side of all boundaries.

    Args:
        rank: this rank.
        forms: the form of a sample at each boundary; boundary s lies between stages s and s + 1.
        exchange: None if this rank exchanges with no other.
    """

    def __init__(
        self, rank: int, forms: Sequence[Form], exchange: Exchange | None, device: torch.device
    ) -> None:
        self.rank, self.forms, self.exchange, self.device = rank, forms, exchange, device
        self._posted: dict[tuple[bool, tuple[int, int]], tuple[Tensor, list[Receipt]]] = {}
        self._pool: dict[tuple[Form, int], list[Tensor]] = defaultdict(list)
        self._in_use: dict[tuple[int, int], list[tuple[tuple[Form, int], Tensor]]] = {}

    def post(self, task: Task) -> None:
        """Post the receipt of rows from other ranks: RECV."""
        assert self.exchange is not None, "no exchange: a single rank receives nothing"
        is_gradient = task.action.kind == "RECV_B"
        buffer = self._acquire(task, is_gradient)
        receipts = [
            self.exchange.receive(buffer[slice(*lane.local)], lane.peer, task.tag)
            for lane in task.lanes
        ]
        self._posted[is_gradient, task.key] = buffer, receipts

    def collect(self, task: Task, is_gradient: bool, local: Tensor | None) -> Tensor:
        """Return all rows that `task` needs: activations, or gradients of its output.

        Args:
            local: the output of this rank's neighbouring stage, if some of the rows are in it.
        """
        local_lanes = [lane for lane in task.lanes if lane.peer == self.rank]
        if local_lanes and len(task.lanes) == 1 and _is_all(local_lanes[0].remote, local):
            assert local is not None
            return local.detach()
        buffer, receipts = self._posted.pop((is_gradient, task.key), (None, []))
        if buffer is None:
            buffer = self._acquire(task, is_gradient)
        for lane in local_lanes:
            assert local is not None, f"{task.line}: this rank's rows are missing"
            buffer[slice(*lane.local)].copy_(local[slice(*lane.remote)])
        if receipts:
            assert self.exchange is not None
            self.exchange.wait(receipts)
        return buffer.detach()

    def send(self, task: Task, output: Tensor) -> None:
        """Start to send rows of `output` to other ranks: SEND."""
        assert self.exchange is not None, "no exchange: a single rank sends nothing"
        arranged = self._form(task).arranged(output)
        for lane in task.lanes:
            self.exchange.send(arranged[slice(*lane.local)], lane.peer, task.tag)

    def release(self, key: tuple[int, int]) -> None:
        """Return the buffers of this (stage, micro-batch) to their pools."""
        for kind, buffer in self._in_use.pop(key, ()):
            self._pool[kind].append(buffer)

    def is_pooled(self, key: tuple[int, int], tensor: Tensor) -> bool:
        """Return whether `tensor` lies in a buffer that `release` would free for reuse."""
        storage = tensor.untyped_storage().data_ptr()
        return any(
            buffer.untyped_storage().data_ptr() == storage
            for _, buffer in self._in_use.get(key, ())
        )

    def _form(self, task: Task) -> Form:
        return self.forms[boundary(task.action.stage, task.action.kind)]

    def _acquire(self, task: Task, is_gradient: bool) -> Tensor:
        kind = self.forms[task.key[0] - (not is_gradient)], task.rows
        pool = self._pool[kind]
        buffer = pool.pop() if pool else kind[0].empty(task.rows, self.device)
        self._in_use.setdefault(task.key, []).append((kind, buffer))
        return buffer


def _is_all(rows: tuple[int, int], tensor: Tensor | None) -> bool:
    return tensor is not None and rows == (0, len(tensor))


def to_channels_last(module: nn.Module) -> None:
    """Give tensors of four dimensions channels_last format; Module.to fails for those of five."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


def keeping_format(activations: Tensor) -> Tensor:
    """Return activations whose gradient will have channels_last format if they have it.

    The gradient of a Flatten has not. The component before it would then compute its backward in
    two formats, with copies of larger tensors than this one.
    """
    if activations.requires_grad and activations.dim() == 4 and _is_channels_last(activations):
        activations.register_hook(_as_channels_last)
    return activations


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _as_channels_last(gradient: Tensor) -> Tensor:
    return gradient.contiguous(memory_format=torch.channels_last)
