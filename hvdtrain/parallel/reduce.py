"""Gradient reduction over the replicas of a stage: a Sum over flat buckets through Horovod.

Each parameter's gradient is a view into a flat, contiguous bucket, so that a reduction needs no
copy and works with any memory format. The loss of each micro-batch is divided by the number of
samples of the whole batch, so that a Sum weights any split correctly. Hooks start a bucket during
backward as soon as its gradients are complete; this changes the time only, not the result. The
first announced backward starts no bucket: it shows whether autograd adds to a parameter's gradient
more than once, as with reentrant checkpoints of a shared layer. If so, no bucket starts before
backward has ended.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvdtrain.errors import UsageError
from hvdtrain.host.poll import wait_until
from hvdtrain.plan.cut import Share
from hvdtrain.plan.passes import BUCKET_BYTES, FIRST_BUCKET_BYTES, group_by_bytes
from hvdtrain.plan.program import ReductionTime


class Gradients(Protocol):
    """The gradients of a stage, as the runtime uses them."""

    def announce(self, share: Share) -> None:
        """Announce that the next backward completes the gradients: reductions may start."""

    def start(self, share: Share) -> None:
        """Start the remaining reductions: every gradient is complete on this replica."""

    def finish(self) -> ReductionTime:
        """Return once every gradient is the sum over all replicas."""

    def are_finite(self) -> bool:
        """Return whether all gradients are finite, after `finish`; the same on all replicas."""

    def zero(self) -> None:
        """Reset the gradients."""


class SerialGradients:
    """The gradients of a stage on one rank: autograd's sums need no reduction."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = list(parameters.values())

    def announce(self, share: Share) -> None:
        """Do nothing: there is no reduction to start early."""

    def start(self, share: Share) -> None:
        """Give parameters that backward did not reach zero gradients, as on several ranks."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def finish(self) -> ReductionTime:
        """Return at once: nothing is in flight."""
        return ReductionTime()

    def are_finite(self) -> bool:
        """Return whether all gradients are finite."""
        return all_finite([value.grad for value in self.parameters if value.grad is not None])

    def zero(self) -> None:
        """Drop the gradients: autograd then stores the next ones without a sum."""
        for parameter in self.parameters:
            parameter.grad = None


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
        self._copying = flat, self.all_reduce(flat, "states")

    def finish(self) -> None:
        """Wait for the copy and store the received buffers."""
        if self._copying is None:
            return
        (flat, handle), self._copying = self._copying, None
        self.wait(handle)
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


@dataclass
class Bucket:
    """A flat buffer with the gradients of `parameters`, followed by batch norm statistics.

    Attributes:
        name: identifies the reduction, the same on all replicas.
        flat: [n], the buffer.
        names: of the parameters.
        tail: views into `flat`, one per statistics tensor.
        missing: places in `parameters` of those whose gradient has not arrived yet.
        handle: the reduction in flight, None if there is none.
    """

    name: str
    flat: Tensor
    names: list[str]
    parameters: list[nn.Parameter]
    tail: list[Tensor] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    handle: Any = None


class ReplicatedGradients:
    """The gradients of a stage on several ranks, summed by Horovod with running statistics.

    Args:
        parameters: the stage's parameters by name, in the order of the model.
        statistics: running statistics of its batch norms by name. Means and variances become
            their average over the replicas, weighted by samples; counters become those of the
            first replica that had samples, so that all replicas hold the same values.
        states: the stage's other buffers that forwards change.
        all_reduce: starts a reduction of a flat tensor in place: (tensor, name) -> handle.
        wait: blocks until the reduction of a handle is done.
        bucket_bytes: a bucket is closed once it holds this many bytes.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        statistics: Mapping[str, Tensor],
        states: States,
        all_reduce: Callable[[Tensor, str], Any],
        wait: Callable[[Any], Any],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.all_reduce, self.wait = all_reduce, wait
        self.statistics = list(statistics.values())
        self.states = CopiedStates(states, all_reduce, wait)
        # Backward reaches the last parameters first.
        backwards = list(parameters.items())[::-1]
        sizes = [parameter.numel() * parameter.element_size() for _, parameter in backwards]
        groups = group_by_bytes(sizes, bucket_bytes, min(FIRST_BUCKET_BYTES, bucket_bytes))
        self.buckets = [
            _make_bucket(
                f"gradients.{i}", dict(backwards[k] for k in group), self._tail(i, groups)
            )
            for i, group in enumerate(groups)
            if group or statistics
        ]
        self.tail = [view for bucket in self.buckets for view in bucket.tail]
        self.announced = False
        self.has_arrived, self.first_is_over, self.each_arrives_once = False, False, True
        self.started_at = 0.0
        for index, bucket in enumerate(self.buckets):
            for place, parameter in enumerate(bucket.parameters):
                hook = _arrival_hook(weakref.ref(self), index, place)
                parameter.register_post_accumulate_grad_hook(hook)

    def announce(self, share: Share) -> None:
        """Announce that the next backward completes the gradients, after all forwards."""
        self.announced = True
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))
        self._take_statistics(share)

    def start(self, share: Share) -> None:
        """Start the buckets that no backward has started."""
        if not self.announced:
            self._take_statistics(share)
        self.first_is_over |= self.announced and self.has_arrived
        self.announced = False
        if not self._is_under_way():
            self.started_at = time.perf_counter()
        for bucket in self.buckets:
            if bucket.handle is None:
                self._start(bucket)
        self.states.start(share)

    def finish(self) -> ReductionTime:
        """Wait for all buckets and store the reduced statistics."""
        waiting_since = time.perf_counter()
        for bucket in self.buckets:
            self.wait(bucket.handle)
            bucket.handle = None
        for view, value in zip(self.tail, self.statistics, strict=True):
            value.copy_(view if value.is_floating_point() else view.round())
        self.states.finish()
        now = time.perf_counter()
        return ReductionTime(total=now - self.started_at, exposed=now - waiting_since)

    def are_finite(self) -> bool:
        """Return whether all gradients and statistics are finite."""
        return all_finite([bucket.flat for bucket in self.buckets])

    def zero(self) -> None:
        """Set every gradient to zero, in place."""
        for bucket in self.buckets:
            bucket.flat.zero_()

    def _take_statistics(self, share: Share) -> None:
        for view, value in zip(self.tail, self.statistics, strict=True):
            view.copy_(value)
            view.mul_(share.weight if value.is_floating_point() else float(share.first))

    def _tail(self, index: int, groups: Sequence[Sequence[int]]) -> list[Tensor]:
        # The last bucket starts last: all replicas have finished their forwards by then.
        return self.statistics if index == len(groups) - 1 else []

    def arrived(self, index: int, place: int) -> None:
        """Record that autograd added to a gradient: in an announced backward it is complete.

        Raises:
            UsageError: if its reduction has started already.
        """
        bucket = self.buckets[index]
        if not self.announced:
            return
        self.has_arrived = True  # a backward without samples never gets here
        if bucket.handle is not None:
            raise UsageError(
                f"the gradient of {bucket.names[place]} changed after its reduction had started, "
                "which did not happen in earlier steps: give its checkpoints use_reentrant=False"
            )
        self.each_arrives_once &= place in bucket.missing
        bucket.missing.discard(place)
        if not bucket.missing and self.first_is_over and self.each_arrives_once:
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        if not self._is_under_way():
            self.started_at = time.perf_counter()
        bucket.handle = self.all_reduce(bucket.flat, bucket.name)

    def _is_under_way(self) -> bool:
        return any(bucket.handle is not None for bucket in self.buckets)


def _arrival_hook(
    gradients: "weakref.ref[ReplicatedGradients]", index: int, place: int
) -> Callable[[Tensor], None]:
    # Python's garbage collector does not see the hooks of a parameter. A hook with a strong
    # reference to the gradients would leak them, and the parameter with them.
    def hook(_: Tensor) -> None:
        target = gradients()
        if target is not None:
            target.arrived(index, place)

    return hook


def horovod_gradients(
    parameters: Mapping[str, nn.Parameter],
    statistics: Mapping[str, Tensor],
    states: States,
    horovod: Any,
    process_set: Any,
    name: str,
) -> Gradients:
    """Return the gradients of a stage on several ranks, summed by Horovod.

    To add another kind of reduction (parameter server, local SGD, compression), replace the two
    functions defined here.

    Args:
        horovod: the initialised Horovod module.
        process_set: Horovod's process set of the stage's ranks.
        name: the same on all ranks of the stage and different from every other stage's.
    """

    def all_reduce(tensor: Tensor, bucket: str) -> Any:
        return horovod.allreduce_async_(
            tensor, name=f"{name}.{bucket}", op=horovod.Sum, process_set=process_set
        )

    def wait(handle: Any) -> None:
        wait_until(lambda: horovod.poll(handle))
        horovod.synchronize(handle)

    return ReplicatedGradients(parameters, statistics, states, all_reduce, wait)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether no tensor holds an infinity or a NaN: a sum shows both in one pass."""
    return not tensors or bool(torch.stack([t.sum() for t in tensors]).sum().isfinite())


def _make_bucket(name: str, named: Mapping[str, nn.Parameter], statistics: list[Tensor]) -> Bucket:
    """Allocate a bucket and make each parameter's gradient a view into it."""
    parameters = list(named.values())
    reference = [*parameters, *statistics][0]
    length = sum(tensor.numel() for tensor in (*parameters, *statistics))
    flat = torch.zeros(length, dtype=reference.dtype, device=reference.device)
    offset = 0
    for parameter in parameters:
        # The parameter's strides: channels_last weights have channels_last gradients.
        parameter.grad = flat.as_strided(parameter.size(), parameter.stride(), offset)
        offset += parameter.numel()
    tail = []
    for value in statistics:
        tail.append(flat[offset : offset + value.numel()].view(value.shape))
        offset += value.numel()
    return Bucket(name, flat, list(named), parameters, tail)
