"""How the replicas of a stage agree on its gradients: a Sum over flat buckets through Horovod.

Each parameter's gradient is a view into a flat, contiguous bucket, so that a reduction neither
copies nor cares for memory formats. The loss of each micro-batch is divided by the number of
samples of the whole batch, so that a Sum weights any split right. Hooks start a bucket during
backward as soon as its gradients are complete; nothing depends on it but time. The first announced
backward starts none: it shows whether autograd adds to a parameter's gradient more than once, as
reentrant checkpoints of a shared layer do, and then no bucket starts before backward has ended.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hvdtrain.errors import UsageError
from hvdtrain.parallel.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, group_by_bytes
from hvdtrain.parallel.cut import Share
from hvdtrain.parallel.states import CopiedStates, States
from hvdtrain.parallel.waiting import ReductionTime
from hvdtrain.poll import wait_until


class Gradients(Protocol):
    """What the runtime asks of a stage's gradients."""

    def announce(self, share: Share) -> None:
        """The next backward completes the gradients: reductions may start during it."""

    def start(self, share: Share) -> None:
        """Start what is not started yet: every gradient is complete on this replica."""

    def finish(self) -> ReductionTime:
        """Return once every gradient is the sum over all replicas."""

    def are_finite(self) -> bool:
        """Whether all gradients are numbers, once they are finished; the same on all replicas."""

    def zero(self) -> None:
        """Forget the gradients."""


class SerialGradients:
    """A stage on one rank: autograd's gradients are the sum already."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = list(parameters.values())

    def announce(self, share: Share) -> None:
        """Nothing has to be announced to oneself."""

    def start(self, share: Share) -> None:
        """Nothing is sent; what backward did not reach has the gradient zero, as on more ranks."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def finish(self) -> ReductionTime:
        """Nothing is in flight."""
        return ReductionTime()

    def are_finite(self) -> bool:
        """Whether all gradients are numbers."""
        return all_finite([value.grad for value in self.parameters if value.grad is not None])

    def zero(self) -> None:
        """Drop the gradients: autograd then moves the next ones in without a sum."""
        for parameter in self.parameters:
            parameter.grad = None


@dataclass
class Bucket:
    """A flat buffer [n] with the gradients of `parameters` and room for statistics behind them."""

    name: str
    flat: Tensor
    names: list[str]
    parameters: list[nn.Parameter]
    tail: list[Tensor] = field(default_factory=list)  # views, one for each of the statistics
    missing: set[int] = field(default_factory=set)  # parameters still to come, by their place
    handle: Any = None


class ReplicatedGradients:
    """A stage on several ranks: Horovod sums its buckets, and running statistics ride along.

    Args:
        parameters: the stage's parameters by name, in the order of the model.
        statistics: its batch norms' running statistics by name. Means and variances become
            their average over the replicas, weighted by samples; counters are those of the
            first replica that had samples, so that all replicas hold the same.
        states: the stage's other buffers that forwards change.
        all_reduce: starts a reduction of a flat tensor in place: (tensor, name) -> handle.
        wait: blocks until the reduction of a handle is done.
        bucket_bytes: a bucket is closed once it holds this much.
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
        """The next backward completes the gradients; the forwards of this stage are over."""
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
        """Wait for all buckets and take the statistics over."""
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
        """Whether all gradients, and the statistics beside them, are numbers."""
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
        # The last bucket is the last to be started: by then the forwards are over everywhere.
        return self.statistics if index == len(groups) - 1 else []

    def arrived(self, index: int, place: int) -> None:
        """Autograd has added to a gradient: it is complete, if the backward is an announced one.

        Raises:
            UsageError: if it is in reduction already.
        """
        bucket = self.buckets[index]
        if not self.announced:
            return
        self.has_arrived = True  # a backward without samples shows nothing
        if bucket.handle is not None:
            raise UsageError(
                f"the gradient of {bucket.names[place]} grew after its reduction had begun, as it "
                "does in some steps only: give its checkpoints use_reentrant=False"
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
    # The parameter keeps its hooks where Python's collector does not see them: a hook that kept
    # the gradients alive would keep them, and so the parameter, for ever.
    def hook(_: Tensor) -> None:
        found = gradients()
        if found is not None:
            found.arrived(index, place)

    return hook


def horovod_gradients(
    parameters: Mapping[str, nn.Parameter],
    statistics: Mapping[str, Tensor],
    states: States,
    horovod: Any,
    process_set: Any,
    name: str,
) -> Gradients:
    """The gradients of a stage on several ranks, summed by Horovod.

    This is the seam for other ways to agree (parameter server, local SGD, compression): all that
    they need to replace is the pair of functions given here.

    Args:
        horovod: the module, started. process_set: Horovod's, of the ranks of the stage.
        name: the same on all ranks of the stage, and unlike that of any other stage.
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
    """Whether no tensor holds an infinity or what is no number: their sum tells, in one pass."""
    return not tensors or bool(torch.stack([each.sum() for each in tensors]).sum().isfinite())


def _make_bucket(name: str, named: Mapping[str, nn.Parameter], statistics: list[Tensor]) -> Bucket:
    """Allocate a bucket and make each parameter's gradient a view into it."""
    parameters = list(named.values())
    reference = [*parameters, *statistics][0]
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
    return Bucket(name, flat, list(named), parameters, tail)
