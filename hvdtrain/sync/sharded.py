"""Gradients whose sums, and whose optimizer's state, are divided among the replicas of a stage.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC
2020, stage 1. A reduce-scatter gives each replica its slice of each flat bucket, its optimizer
updates the same slice of a flat buffer of weights, and an all-gather copies the updated slices to
all replicas. Together they send as many bytes as an all-reduce. The parameters of the model are
views into the buffers of weights.
"""

import json
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.host import process
from hvdtrain.plan.schedule import BUCKET_BYTES
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.gradients import (
    Bucket,
    ExactSums,
    ReplicatedGradients,
    State,
    all_finite,
    laid_out,
    make_bucket,
)
from hvdtrain.sync.states import States

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
        names = [f"{kind}.{name}" for kind in ("weights", "whole") for name in self.weights]
        collectives.prepare([*names, "finite", "keys"])

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
        bad = torch.tensor([0.0 if all_finite([*local, *tails]) else 1.0])
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
        lines = self.collectives.wait(self.collectives.all_gather(line, "keys"))
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
