"""Gradients of a stage that its replicas sum over flat buckets.

Each parameter's gradient is a view into a flat, contiguous bucket, so that a reduction needs no
copy and works with any memory format. The loss of each micro-batch is divided by the number of
samples of the whole batch, so that a Sum weights any split correctly. Hooks start a bucket during
backward as soon as its gradients, and those of the buckets before it, are complete: so all
replicas start them in one order, one without samples, too. This changes the time only, not the
result. The first announced backward starts no bucket: it shows whether autograd adds to a
parameter's gradient more than once, as with reentrant checkpoints of a shared layer. If so, no
bucket starts before backward has ended.

Sums, and the optimizer's state, may be divided among the replicas (Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, stage 1). A
reduce-scatter gives each replica its slice of each flat bucket, its optimizer updates the same
slice of a flat buffer of weights, and an all-gather copies the updated slices to all replicas.
Together they send as many bytes as an all-reduce. The parameters of the model are then views into
the buffers of weights.
"""

import json
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from hvdtrain.device import Mark, mark
from hvdtrain.errors import UsageError
from hvdtrain.host import process
from hvdtrain.models.component import is_dense
from hvdtrain.plan.cut import Share
from hvdtrain.plan.schedule import BUCKET_BYTES, FIRST_BUCKET_BYTES, group_by_bytes
from hvdtrain.plan.trace import Reduction
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.states import CopiedStates, Kept, Shapes, States

State: TypeAlias = Mapping[str, Mapping[str, Tensor]]


class Gradients(Kept, Protocol):
    """The gradients of a stage, as the runtime and its optimizer use them.

    Attributes:
        is_divided: whether each replica holds only its slice of the sums.
    """

    is_divided: bool = False

    def announce(self, share: Share) -> None:
        """Announce that the next backward completes the gradients: reductions may start."""

    def start(self, share: Share) -> None:
        """Start the remaining reductions: every gradient is complete on this replica."""

    def finish(self) -> Reduction | None:
        """Return once every gradient is the sum over all replicas."""

    def are_finite(self) -> bool:
        """Return whether all gradients are finite, after `finish`; the same on all replicas."""
        return not bool(self.verdict())

    def verdict(self) -> Tensor | None:
        """Return 1.0 on the device if a gradient is not finite, else 0.0; None without any."""

    def after_update(self) -> None:
        """Complete the update of the weights. Collective among the replicas.

        Not called after a step that the host leaves out, or computes again only to explain it; but
        called where the device leaves one out by itself, after which the run ends.
        """
        return

    def zero(self) -> None:
        """Reset the gradients."""

    def counted(self) -> Mapping[str, float]:
        """Return what this rank has counted since the start, by name, such as bytes sent."""

    def updated(self) -> Mapping[str, nn.Parameter]:
        """Return what this rank's optimizer updates, by the name of the parameter."""

    def reduced(self) -> list[Tensor]:
        """Return the sums that this rank's optimizer uses; not copies."""
        return [value.grad for value in self.updated().values() if value.grad is not None]

    def gather(self) -> None:
        """Give each parameter its whole sum, after `finish`. Collective among the replicas."""
        return

    def whole_state(self, state: State, names: Collection[str]) -> State:
        """Return the state of whole parameters for that of `updated`. Collective among replicas.

        Args:
            state: the optimizer's tensors by the name of the parameter and key.
            names: of the parameters whose state this replica needs.
        """
        return {name: state[name] for name in names if name in state}

    def local_state(self, name: str, key: str, value: Tensor) -> Tensor:
        """Return the part of a tensor of the state that belongs to `updated`.

        Args:
            value: of the whole parameter.
        """
        return value


def whole_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient after backward, dense; zeros if backward did not reach it."""
    gradient = parameter.grad
    return torch.zeros_like(parameter) if gradient is None else gradient.to_dense()


class SerialGradients(Gradients):
    """The gradients of a stage on one rank: autograd's sums need no reduction."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.named, self.parameters = dict(parameters), list(parameters.values())

    def announce(self, share: Share) -> None:
        """Do nothing: there is no reduction to start early."""

    def start(self, share: Share) -> None:
        """Make all gradients whole: zeros where backward missed one, and dense, as in buckets."""
        for parameter in self.parameters:
            parameter.grad = whole_gradient(parameter)

    def finish(self) -> Reduction | None:
        """Return at once: nothing is in flight."""
        return None

    def verdict(self) -> Tensor | None:
        """Return whether a gradient is not finite."""
        return infinite([value.grad for value in self.parameters if value.grad is not None])

    def zero(self) -> None:
        """Drop the gradients: autograd then stores the next ones without a sum."""
        for parameter in self.parameters:
            parameter.grad = None

    def counted(self) -> Mapping[str, float]:
        """Return nothing: this rank sends no gradients."""
        return {}

    def updated(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters."""
        return self.named


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


class Sums(Kept, Protocol):
    """The way in which a bucket of each replica becomes the sum over all replicas."""

    def attach(self, buckets: Sequence[Bucket]) -> None:
        """Prepare for the buckets that will be summed; called once, before anything else."""
        return

    def start(self, bucket: Bucket) -> Any:
        """Start to sum a bucket; return a handle, which is not None."""

    def finish(self, bucket: Bucket, handle: Any) -> None:
        """Return once the bucket holds the sum, the same bits on all replicas."""

    def after_update(self) -> None:
        """Count the last sum of every bucket: they go into the weights."""
        return

    def counted(self) -> Mapping[str, float]:
        """Return what this rank has counted since the start, by name."""


class ExactSums(Sums):
    """Sums of the buckets as they are."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    def start(self, bucket: Bucket) -> Any:
        """Start an all-reduce in place."""
        return self.collectives.all_reduce(bucket.flat, bucket.name)

    def finish(self, bucket: Bucket, handle: Any) -> None:
        """Wait for the all-reduce."""
        self.collectives.wait(handle)

    def counted(self) -> Mapping[str, float]:
        """Return the bytes that this rank has sent."""
        return {"sent_bytes": self.collectives.sent_bytes}


class ReplicatedGradients(Gradients):
    """The gradients of a stage on several ranks, summed with its running statistics.

    Args:
        parameters: the stage's parameters by name, in the order of the model.
        statistics: running statistics of its batch norms by name. Means and variances become
            their average over the replicas, weighted by samples; counters become those of the
            first replica that had samples, so that all replicas hold the same values.
        states: the stage's other buffers that forwards change.
        collectives: among the replicas.
        sums: how buckets are summed; None: exactly.
        bucket_bytes: a bucket is closed once it holds this many bytes.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        statistics: Mapping[str, Tensor],
        states: States,
        collectives: Collectives,
        sums: Sums | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.sums: Sums = sums or ExactSums(collectives)
        self.named = dict(parameters)
        self.statistics = list(statistics.values())
        self.states, self.progress = CopiedStates(states, collectives), collectives.progress
        # Backward reaches the last parameters first.
        backwards = list(parameters.items())[::-1]
        sizes = [round(collectives.scale * parameter.nbytes) for _, parameter in backwards]
        groups = group_by_bytes(sizes, bucket_bytes, min(FIRST_BUCKET_BYTES, bucket_bytes))
        self.buckets = self._make_buckets([dict(backwards[k] for k in group) for group in groups])
        self.sums.attach(self.buckets)
        self.tail = [view for bucket in self.buckets for view in bucket.tail]
        self.announced = False
        self.has_arrived, self.first_is_over, self.each_arrives_once = False, False, True
        self.device = next((bucket.flat.device for bucket in self.buckets), torch.device("cpu"))
        self.started_at: Mark = 0.0
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
        self.restore_layout()
        if not self.announced:
            self._take_statistics(share)
        self.first_is_over |= self.announced and self.has_arrived
        self.announced = False
        if not self._is_under_way():
            self.started_at = mark(self.device)
        for bucket in self.buckets:
            if bucket.handle is None:
                self._start(bucket)
        self.states.start(share)

    @torch.no_grad()
    def restore_layout(self) -> None:
        """Give weights the memory order of their gradients again.

        A forward may have replaced it, as `weight.data = normalize(weight.data)` does, and fused
        optimizers walk through both element by element.
        """
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                gradient = parameter.grad
                if gradient is not None and parameter.stride() != gradient.stride():
                    parameter.data = torch.empty_like(gradient).copy_(parameter)

    def finish(self) -> Reduction | None:
        """Wait for all buckets and store the reduced statistics."""
        waiting_since = mark(self.device)
        for bucket in self.buckets:
            self.sums.finish(bucket, bucket.handle)
            bucket.handle = None
        for view, value in zip(self.tail, self.statistics, strict=True):
            value.copy_(view if value.is_floating_point() else view.round())
        self.states.finish()
        return Reduction(self.started_at, waiting_since, mark(self.device))

    def verdict(self) -> Tensor | None:
        """Return whether a gradient or a statistic is not finite."""
        return infinite([bucket.flat for bucket in self.buckets])

    def after_update(self) -> None:
        """Continue with what the sums keep from this step."""
        self.sums.after_update()

    def zero(self) -> None:
        """Set every gradient to zero, in place."""
        for bucket in self.buckets:
            bucket.flat.zero_()

    def counted(self) -> Mapping[str, float]:
        """Return what the sums have counted."""
        return self.sums.counted()

    def updated(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters."""
        return self.named

    def saved(self) -> dict[str, Tensor]:
        """Return what the sums keep from step to step."""
        return self.sums.saved()

    def wanted(self, shapes: Shapes) -> frozenset[str]:
        """Return what the sums read."""
        return self.sums.wanted(shapes)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the sums what was saved."""
        self.sums.load(tensors)

    def _take_statistics(self, share: Share) -> None:
        for view, value in zip(self.tail, self.statistics, strict=True):
            factor = share.weight if value.is_floating_point() else float(share.first)
            if factor:
                view.copy_(value).mul_(factor)
            else:  # without samples a mean is NaN, and zero times NaN is NaN
                view.zero_()

    def _make_buckets(self, groups: Sequence[Mapping[str, nn.Parameter]]) -> list[Bucket]:
        """Return the buckets of groups of parameters by name."""
        # The last bucket starts last: all replicas have finished their forwards by then.
        tails = [*([] for _ in groups[1:]), self.statistics]
        return [
            make_bucket(f"gradients.{i}", group, tail)
            for i, (group, tail) in enumerate(zip(groups, tails, strict=True))
            if group or tail
        ]

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
        if self._is_under_way():
            self.progress()
        if bucket.missing or not (self.first_is_over and self.each_arrives_once):
            return
        for one in self.buckets:
            if one.missing or not one.parameters:
                break
            if one.handle is None:
                self._start(one)

    def _start(self, bucket: Bucket) -> None:
        if not self._is_under_way():
            self.started_at = mark(self.device)
        bucket.handle = self.sums.start(bucket)

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


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether no tensor holds an infinity or a NaN."""
    return not bool(infinite(tensors))


def infinite(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return 1.0 if a tensor holds an infinity or a NaN, else 0.0, on their device."""
    if not tensors:
        return None
    # A sum shows both in one pass.
    return (~torch.stack([t.sum() for t in tensors]).sum().isfinite()).float()


def laid_out(flat: Tensor, parameter: Tensor, offset: int) -> Tensor:
    """Return a view of `flat` in the shape and memory order of a parameter.

    So channels_last weights have channels_last gradients.
    """
    assert is_dense(parameter), "a flat buffer has no place for gaps"
    return flat.as_strided(parameter.size(), parameter.stride(), offset)


def make_bucket(
    name: str, named: Mapping[str, nn.Parameter], statistics: Sequence[Tensor], slices: int = 1
) -> Bucket:
    """Allocate a bucket and make each parameter's gradient a view into it.

    Args:
        slices: the bucket has zeros at its end, so that it divides into as many equal slices.
    """
    parameters = list(named.values())
    reference = [*parameters, *statistics][0]
    length = sum(tensor.numel() for tensor in (*parameters, *statistics))
    length += -length % slices
    flat = torch.zeros(length, dtype=reference.dtype, device=reference.device)
    offset = 0
    for parameter in parameters:
        parameter.grad = laid_out(flat, parameter, offset)
        offset += parameter.numel()
    tail = []
    for value in statistics:
        tail.append(flat[offset : offset + value.numel()].view(value.shape))
        offset += value.numel()
    return Bucket(name, flat, list(named), parameters, tail)


STATISTICS = "statistics"
NUMBER = "step"  # the only key of torch's optimizers whose value is one number per parameter
LINE_BYTES = 512
IN_FLIGHT = 2  # all-gathers: each one's result takes the memory of a whole bucket


@dataclass(frozen=True)
class Span:
    """The place of a parameter in a bucket.

    Attributes:
        start, stop: its elements in the bucket, in the order of its memory.
    """

    bucket: Bucket
    parameter: nn.Parameter
    start: int
    stop: int

    def of(self, flat: Tensor) -> Tensor:
        """Return a view in the parameter's shape into a buffer that is divided as the bucket."""
        return laid_out(flat, self.parameter, self.start)


class SlicedSums(ExactSums):
    """Sums that give each replica its slice, in place; statistics are summed as a whole."""

    def start(self, bucket: Bucket) -> Any:
        """Start a reduce-scatter."""
        if not bucket.parameters:
            return super().start(bucket)
        return self.collectives.reduce_scatter(bucket.flat, bucket.name)

    def finish(self, bucket: Bucket, handle: Any) -> None:
        """Wait, and store the slice in its place in the bucket."""
        result = self.collectives.wait(handle)
        if bucket.parameters:
            slice_of(bucket.flat, self.collectives).copy_(result)


class ShardedGradients(ReplicatedGradients):
    """Gradients of a stage for an optimizer that updates this replica's slices only.

    Attributes:
        weights: by name of a bucket, the buffer of its parameters.
        pieces: by name, the part of each parameter in this replica's slices, as a flat parameter
            with a view of its sum as gradient. If there is none, one without elements.
        starts: by name, the place of a piece in the buffer.
    """

    is_divided = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        statistics: Mapping[str, Tensor],
        states: States,
        collectives: Collectives,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.collectives = collectives
        self.weights: dict[str, Tensor] = {}
        self.spans: dict[str, Span] = {}
        self.pieces: dict[str, nn.Parameter] = {}
        self.starts: dict[str, int] = {}
        sums = SlicedSums(collectives)
        super().__init__(parameters, statistics, states, collectives, sums, bucket_bytes)
        process.return_freed_memory()  # that of the parameters before they became views

    def _make_buckets(self, groups: Sequence[Mapping[str, nn.Parameter]]) -> list[Bucket]:
        buckets = [
            make_bucket(f"gradients.{i}", group, [], self.collectives.size)
            for i, group in enumerate(groups)
            if group
        ]
        for bucket in buckets:
            self._divide(bucket)
        if not self.pieces:  # optimizers skip a parameter without a gradient
            self.pieces[buckets[0].names[0]] = nn.Parameter(buckets[0].flat.new_empty(0))
        # Apart from the gradients: every replica needs all of them. Started last, as ever.
        tail = [make_bucket(STATISTICS, {}, self.statistics)] if self.statistics else []
        return buckets + tail

    @torch.no_grad()
    def _divide(self, bucket: Bucket) -> None:
        """Make the parameters of a bucket views into a flat buffer, and note their pieces."""
        flat = torch.zeros_like(bucket.flat)
        self.weights[bucket.name] = flat
        length = flat.numel() // self.collectives.size
        first, offset = self.collectives.place * length, 0
        for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
            span = Span(bucket, parameter, offset, offset + parameter.numel())
            view = span.of(flat)
            view.copy_(parameter)
            parameter.data = view
            self.spans[name] = span
            start, stop = max(span.start, first), min(span.stop, first + length)
            if start < stop:
                self.pieces[name] = piece = nn.Parameter(flat[start:stop])
                piece.grad = bucket.flat[start:stop]
                self.starts[name] = start
            offset = span.stop

    @torch.no_grad()
    def restore_layout(self) -> None:
        """Copy weights that a forward has replaced back into their buffers."""
        super().restore_layout()
        for span in self.spans.values():
            flat = self.weights[span.bucket.name]
            if span.parameter.data_ptr() != flat.data_ptr() + span.start * flat.element_size():
                span.parameter.data = span.of(flat).copy_(span.parameter)

    def updated(self) -> Mapping[str, nn.Parameter]:
        """Return the pieces."""
        return self.pieces

    def are_finite(self) -> bool:
        """Return whether all sums and statistics are finite on all replicas. Collective."""
        local = [slice_of(bucket.flat, self.collectives) for bucket in self._divided()]
        tails = [bucket.flat for bucket in self.buckets if not bucket.parameters]
        bad = torch.tensor([0.0 if all_finite([*local, *tails]) else 1.0], device=self.device)
        return not float(self.collectives.wait(self.collectives.all_reduce(bad, "finite")))

    def gather(self) -> None:
        """Copy the slices of the sums to all replicas."""
        self._exchange("whole", {bucket.name: bucket.flat for bucket in self._divided()})

    def after_update(self) -> None:
        """Copy the updated slices of the weights to all replicas."""
        self._exchange("weights", self.weights)

    @torch.no_grad()
    def _exchange(self, kind: str, buffers: Mapping[str, Tensor]) -> None:
        """Give all replicas the slices of buffers, which are divided as the buckets."""
        waiting: deque[tuple[Tensor, Any]] = deque()
        for name, flat in buffers.items():
            part = slice_of(flat, self.collectives)
            waiting.append((flat, self.collectives.all_gather(part, f"{kind}.{name}")))
            if len(waiting) == IN_FLIGHT:
                self._store(*waiting.popleft())
        while waiting:
            self._store(*waiting.popleft())

    def _store(self, flat: Tensor, handle: Any) -> None:
        flat.copy_(self.collectives.wait(handle).view(-1))

    @torch.no_grad()
    def whole_state(self, state: State, names: Collection[str]) -> State:
        """Return the optimizer's state of these parameters, by name and key.

        Buckets are gathered one after another: the state of all may not fit.
        """
        keys, scalars = self._agree_on_keys(state)
        whole: dict[str, dict[str, Tensor]] = {name: {} for name in self.spans if name in names}
        for key, bucket in product(keys, self._divided()):
            flat = torch.zeros_like(bucket.flat)
            for name in bucket.names:
                if (start := self.starts.get(name)) is not None:
                    value = state[name][key]
                    flat[start : start + len(value)] = value
            self._exchange("whole", {bucket.name: flat})
            for name in bucket.names:
                if name in whole:
                    whole[name][key] = self.spans[name].of(flat).clone()
        for entries in whole.values():
            entries |= {key: torch.tensor(value) for key, value in scalars.items()}
        return whole

    def _agree_on_keys(self, state: State) -> tuple[list[str], dict[str, float]]:
        """Return the keys of the tensors of the state, and its numbers, which parameters share.

        A replica without elements has no state.
        """
        entries = next((state[name] for name in self.starts if name in state), {})
        numbers = {key: float(value) for key, value in entries.items() if value.dim() == 0}
        text = json.dumps([[key for key in entries if key not in numbers], numbers]).encode()
        line = torch.frombuffer(bytearray(text.ljust(LINE_BYTES)), dtype=torch.uint8)
        handle = self.collectives.all_gather(line.to(self.device), "keys")
        lines = self.collectives.wait(handle).cpu()
        agreed = max((bytes(row.tolist()) for row in lines), key=lambda row: len(row.strip()))
        keys, scalars = json.loads(agreed)
        return keys, scalars

    def local_state(self, name: str, key: str, value: Tensor) -> Tensor:
        """Return the part of a tensor of the state that belongs to this replica's piece."""
        span, piece = self.spans[name], self.pieces[name]
        if key == NUMBER:
            return value
        flat = torch.empty(span.stop - span.start, dtype=value.dtype)
        laid_out(flat, span.parameter, 0).copy_(value)
        start = self.starts.get(name, span.start) - span.start
        return flat[start : start + piece.numel()]

    def _divided(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.parameters]


def slice_of(flat: Tensor, collectives: Collectives) -> Tensor:
    """Return this replica's slice of a buffer."""
    return flat.view(collectives.size, -1)[collectives.place]
