"""Compressed sums of gradients: in 16 bits, of the largest values only, or of low rank."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hvdtrain.options import requests
from hvdtrain.options.requests import CompressRequest
from hvdtrain.plan.traffic import largest_count, padded
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.gradients import ExactSums, Sums
from hvdtrain.sync.powersgd import PowerSums
from hvdtrain.sync.residuals import CompressedSums, Residual

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def make_sums(request: CompressRequest, collectives: Collectives) -> Sums:
    """Return the sums that a value of `--compress` requests.

    A single replica sends nothing, and therefore compresses nothing.

    Args:
        collectives: among the replicas.
    """
    if isinstance(request, requests.NoCompression):
        return ExactSums(collectives)
    if collectives.size == 1:
        return SingleSums(collectives, request.after)
    match request:
        case requests.Half(dtype, after):
            return HalfSums(DTYPES[dtype], collectives, after)
        case requests.TopK(ratio, after):
            return TopKSums(ratio, collectives, after)
        case requests.PowerSGD(rank, after):
            return PowerSums(rank, collectives, after)
    raise AssertionError(f"{request} is not known")


class SingleSums(CompressedSums):
    """The gradients of a single replica, to which it adds what several replicas have left out."""

    def send(self, residual: Residual, full: Tensor) -> str:
        """Store the gradients with the residual, which is then zero."""
        residual.gradients.copy_(full)
        full.zero_()
        return "done"  # None would mean that the bucket has not started

    def receive(self, residual: Residual, handle: Any) -> None:
        """Return at once: nothing is in flight."""


@dataclass
class Sent:
    """The operations of one bucket in flight.

    Attributes:
        handle: of the gradients.
        tail: of the statistics; None if there are none.
    """

    handle: Any
    tail: Any


class TwoPartSums(CompressedSums):
    """Compressed sums of gradients, beside an exact sum of the statistics of the same bucket."""

    def start_tail(self, residual: Residual) -> Any:
        """Start the exact sum of the statistics."""
        if not len(residual.tail):
            return None
        return self.collectives.all_reduce(residual.tail, f"{residual.bucket.name}.tail")

    def finish_tail(self, sent: Sent) -> None:
        """Wait for the sum of the statistics."""
        if sent.tail is not None:
            self.collectives.wait(sent.tail)


class HalfSums(TwoPartSums):
    """Sums of gradients that travel in 16 bits.

    Each replica sums a slice of the bucket in the gradients' own dtype and sends the sum to all,
    in 16 bits again. Both roundings enter the residuals. The bytes are those of an all-reduce in
    16 bits, which would add up in 16 bits and lose what each addition rounds off.

    Nothing is scaled: gradients are weighted by the share of the global batch, so that the sum is
    the gradient of the mean loss, however many replicas there are. If a value or the sum exceeds
    the range of fp16, an infinity arrives on all replicas, and the step is a bad one.
    """

    parts = ("slices", "sums", "tail")

    def __init__(self, dtype: torch.dtype, collectives: Collectives, after: int = 0) -> None:
        super().__init__(collectives, after)
        self.dtype = dtype

    def send(self, residual: Residual, full: Tensor) -> Sent:
        """Start to send each replica its slice."""
        length = padded(len(full), self.collectives.size)
        halves = functional.pad(full, (0, length - len(full))).to(self.dtype)
        full.sub_(halves[: len(full)])
        bits = halves.view(torch.uint8)  # libraries know no bf16
        handle = self.collectives.all_to_all(bits, f"{residual.bucket.name}.slices")
        return Sent(handle, self.start_tail(residual))

    def receive(self, residual: Residual, handle: Sent) -> None:
        """Sum this replica's slice, and gather the sums of all."""
        slices = self.collectives.wait(handle.handle).view(self.dtype)
        total = torch.zeros_like(slices[0], dtype=residual.gradients.dtype)
        for piece in slices:
            total += piece
        halves = total.to(self.dtype)
        name = f"{residual.bucket.name}.sums"
        gathering = self.collectives.all_gather(halves.view(torch.uint8), name)
        mine = residual.following[self.collectives.place * len(total) :][: len(total)]
        mine.add_((total - halves)[: len(mine)])
        sums = self.collectives.wait(gathering).view(self.dtype).flatten()
        residual.gradients.copy_(sums[: residual.size])
        self.finish_tail(handle)


@dataclass
class SentLargest(Sent):
    """The operations of one bucket in flight, and the number of values that a replica sends."""

    count: int


class TopKSums(TwoPartSums):
    """Sums of the largest values of each replica's bucket.

    Stich et al., 2018; Lin et al., "Deep Gradient Compression", 2018, without its corrections of
    the momentum. The residual is what was not sent. NaN counts as the largest value, so that all
    replicas see it.

    Args:
        ratio: share of the values that each replica sends, rounded up per bucket.
    """

    parts = ("largest", "tail")

    def __init__(self, ratio: float, collectives: Collectives, after: int = 0) -> None:
        super().__init__(collectives, after)
        self.ratio = ratio

    def send(self, residual: Residual, full: Tensor) -> SentLargest:
        """Start to gather values and places, as bytes."""
        count = largest_count(self.ratio, len(full))
        places = full.abs().topk(count, sorted=False).indices
        bits = torch.cat([full[places].view(torch.uint8), places.int().view(torch.uint8)])
        full[places] = 0
        handle = self.collectives.all_gather(bits, f"{residual.bucket.name}.largest")
        return SentLargest(handle, self.start_tail(residual), count)

    def receive(self, residual: Residual, handle: SentLargest) -> None:
        """Add what each replica has sent, in the same order on all replicas."""
        gradients = residual.gradients
        gathered = self.collectives.wait(handle.handle)
        split = handle.count * gradients.element_size()
        values = _as_dtype(gathered[:, :split], gradients.dtype)
        places = _as_dtype(gathered[:, split:], torch.int32)
        gradients.zero_()
        for one, other in zip(places, values, strict=True):
            gradients.index_add_(0, one, other)
        self.finish_tail(handle)


def _as_dtype(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes [rows, bytes] as numbers [rows, n], in memory that is aligned for them."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)
