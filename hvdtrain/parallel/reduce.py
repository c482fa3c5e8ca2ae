"""How the replicas of a stage agree on its gradients: a Sum over flat buckets through Horovod.

Each parameter's gradient is a view into a flat, contiguous bucket, so that a reduction neither
copies nor cares for memory formats. The loss of each micro-batch is divided by the number of
samples of the whole batch, so that a Sum weights any split right. Hooks start a bucket during
backward as soon as its gradients are complete; nothing depends on it but time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20


@dataclass
class Waiting:
    """Seconds of communication of one step: in flight at all, and with nothing to compute."""

    total: float = 0.0
    exposed: float = 0.0


class Gradients(Protocol):
    """What the runtime asks of a stage's gradients."""

    def complete_with_next_backward(self, samples: int, first: bool, batch_size: int) -> None:
        """Announce the last backward of a step, in which reductions may start early."""

    def reduce(self) -> Waiting:
        """Return once every gradient is the sum over all replicas."""

    def zero(self) -> None:
        """Forget the gradients."""


class SerialGradients:
    """A stage on one rank: autograd's gradients are the sum already."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = list(parameters.values())

    def complete_with_next_backward(self, samples: int, first: bool, batch_size: int) -> None:
        """Nothing has to be announced to oneself."""

    def reduce(self) -> Waiting:
        """Nothing is in flight; what backward did not reach has the gradient zero, as on more."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return Waiting()

    def zero(self) -> None:
        """Drop the gradients: autograd then moves the next ones in without a sum."""
        for parameter in self.parameters:
            parameter.grad = None


@dataclass
class Bucket:
    """A flat buffer [n] with the gradients of `parameters` and room for statistics behind them."""

    name: str
    flat: Tensor
    parameters: list[nn.Parameter]
    tail: list[Tensor] = field(default_factory=list)  # views, one for each of the statistics
    missing: int = 0  # gradients still to come in the announced backward
    handle: Any = None


class ReplicatedGradients:
    """A stage on several ranks: Horovod sums its buckets, and running statistics ride along.

    Args:
        parameters: the stage's parameters by name, in the order of the model.
        statistics: its batch norms' running statistics by name. Means and variances become
            their average over the replicas, weighted by samples; counters are those of the
            first replica that had samples, so that all replicas hold the same.
        all_reduce: starts a reduction of a flat tensor in place: (tensor, name) -> handle.
        wait: blocks until the reduction of a handle is done.
        bucket_bytes: a bucket is closed once it holds this much.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        statistics: Mapping[str, Tensor],
        all_reduce: Callable[[Tensor, str], Any],
        wait: Callable[[Any], Any],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.all_reduce, self.wait = all_reduce, wait
        self.statistics = list(statistics.values())
        # Backward reaches the last parameters first.
        backwards = list(parameters.values())[::-1]
        groups = group_by_bytes([p.numel() * p.element_size() for p in backwards], bucket_bytes)
        self.buckets = [
            _make_bucket(f"gradients.{i}", [backwards[k] for k in group], self._tail(i, groups))
            for i, group in enumerate(groups)
        ]
        self.announced = False
        self.started_at = 0.0
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._on_gradient(bucket))

    def complete_with_next_backward(self, samples: int, first: bool, batch_size: int) -> None:
        """Announce the last backward of a step.

        Args:
            samples: this replica's part of the batch.
            first: whether it is the first replica with samples.
            batch_size: samples of the whole batch, over all replicas.
        """
        self.announced = True
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        for view, value in zip(self.buckets[-1].tail, self.statistics, strict=True):
            view.copy_(value)
            view.mul_(samples / batch_size if value.is_floating_point() else float(first))

    def reduce(self) -> Waiting:
        """Start what backward has not started, wait for all, and take the statistics over."""
        for bucket in self.buckets:
            if bucket.handle is None:
                self._start(bucket)
        waiting_since = time.perf_counter()
        for bucket in self.buckets:
            self.wait(bucket.handle)
            bucket.handle = None
        for view, value in zip(self.buckets[-1].tail, self.statistics, strict=True):
            value.copy_(view if value.is_floating_point() else view.round())
        self.announced = False
        now = time.perf_counter()
        return Waiting(total=now - self.started_at, exposed=now - waiting_since)

    def zero(self) -> None:
        """Set every gradient to zero, in place."""
        for bucket in self.buckets:
            bucket.flat.zero_()

    def _tail(self, index: int, groups: Sequence[Sequence[int]]) -> list[Tensor]:
        # The last bucket is the last to be started: by then the forwards are over everywhere.
        return self.statistics if index == len(groups) - 1 else []

    def _on_gradient(self, bucket: Bucket) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if self.announced:
                bucket.missing -= 1
                if bucket.missing == 0:
                    self._start(bucket)

        return hook

    def _start(self, bucket: Bucket) -> None:
        if all(other.handle is None for other in self.buckets):
            self.started_at = time.perf_counter()
        bucket.handle = self.all_reduce(bucket.flat, bucket.name)


def horovod_gradients(
    parameters: Mapping[str, nn.Parameter], statistics: Mapping[str, Tensor], horovod: Any
) -> ReplicatedGradients:
    """The gradients of a stage on all ranks, summed by Horovod.

    This is the seam for other ways to agree (parameter server, local SGD, compression): all that
    they need to replace is the pair of functions given here.
    """

    def all_reduce(tensor: Tensor, name: str) -> Any:
        return horovod.allreduce_async_(tensor, name=name, op=horovod.Sum)

    return ReplicatedGradients(parameters, statistics, all_reduce, horovod.synchronize)


def group_by_bytes(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of `sizes` in order, in groups closed as soon as they reach `limit` bytes."""
    groups: list[list[int]] = [[]]
    held = 0
    for index, size in enumerate(sizes):
        if held >= limit:
            groups.append([])
            held = 0
        groups[-1].append(index)
        held += size
    return groups


def _make_bucket(name: str, parameters: list[nn.Parameter], statistics: list[Tensor]) -> Bucket:
    """Allocate a bucket and make each parameter's gradient a view into it."""
    reference = parameters[0]
    length = sum(tensor.numel() for tensor in (*parameters, *statistics))
    flat = torch.zeros(length, dtype=reference.dtype, device=reference.device)
    offset = 0
    for parameter in parameters:
        # The parameter's own strides: channels_last weights have channels_last gradients.
        parameter.grad = flat.as_strided(parameter.size(), parameter.stride(), offset)
        offset += parameter.numel()
    tail = []
    for value in statistics:
        tail.append(flat[offset : offset + value.numel()].view(value.shape))
        offset += value.numel()
    return Bucket(name, flat, parameters, tail)
