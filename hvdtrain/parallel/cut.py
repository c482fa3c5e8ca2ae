"""How a global batch is cut: which samples each rank works on, and what ranks hand on.

Micro-batch k is the k-th contiguous slice of the batch; the replicas of each stage take contiguous
shares of it. Where neighbouring stages share differently, a replica hands parts of its rows to
several: the overlaps of their ranges.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from hvdtrain.data import order
from hvdtrain.parallel.plan import Plan

Range = tuple[int, int]  # [start, stop)


@dataclass(frozen=True)
class Piece:
    """Rows of a micro-batch that `sender` (of `stage`) hands to `receiver` (of the next one).

    Gradients of the same rows come back the same way. `sent` are the rows in the sender's part of
    the micro-batch, `received` the same rows in the receiver's.
    """

    stage: int
    microbatch: int
    sender: int
    receiver: int
    sent: Range
    received: Range

    @property
    def is_local(self) -> bool:
        """Whether nothing has to be sent: one rank holds both stages."""
        return self.sender == self.receiver


@dataclass(frozen=True)
class Share:
    """A replica's part of a batch, which is what its running statistics weigh.

    Attributes:
        weight: its samples over those of the whole batch.
        first: whether it is the first replica of its stage with samples.
    """

    weight: float
    first: bool


@dataclass(frozen=True)
class Cut:
    """A batch of `batch_size` samples, cut for a plan.

    Attributes:
        parts: for each stage and each rank of it, the samples of each micro-batch, as ranges
            relative to the start of the batch.
        pieces: what is handed on, by (stage, micro-batch), local pieces included.
    """

    batch_size: int
    microbatches: int
    parts: tuple[dict[int, tuple[Range, ...]], ...]
    pieces: dict[tuple[int, int], tuple[Piece, ...]]

    @cached_property
    def receivers(self) -> "Peers":
        """The other ranks to which a rank hands rows."""
        return _by_rank((piece.sender, piece.receiver, piece) for piece in self._sent())

    @cached_property
    def senders(self) -> "Peers":
        """The other ranks from which a rank gets rows."""
        return _by_rank((piece.receiver, piece.sender, piece) for piece in self._sent())

    @cached_property
    def kept(self) -> frozenset[tuple[int, int | None, int]]:
        """Where a rank that holds both stages keeps rows: (boundary, micro-batch, rank)."""
        every = (each for those in self.pieces.values() for each in those)
        return frozenset((p.stage, p.microbatch, p.sender) for p in every if p.is_local)

    def _sent(self) -> Iterator[Piece]:
        return (each for those in self.pieces.values() for each in those if not each.is_local)

    def rows(self, stage: int, rank: int, microbatch: int) -> int:
        """Samples of a micro-batch that `rank` works on in `stage`."""
        start, stop = self.parts[stage][rank][microbatch]
        return stop - start

    def samples(self, stage: int, rank: int) -> int:
        """Samples of the whole batch that `rank` works on in `stage`; 0 if it does not hold it."""
        return sum(stop - start for start, stop in self.parts[stage].get(rank, ()))

    def share(self, stage: int, rank: int) -> Share:
        """The part of the batch that `rank` works on in `stage`."""
        first = next(other for other in self.parts[stage] if self.samples(stage, other))
        return Share(self.samples(stage, rank) / self.batch_size, rank == first)


# By (boundary, micro-batch, rank); boundary s lies between stages s and s + 1.
Peers = dict[tuple[int, int | None, int], tuple[int, ...]]


def _by_rank(pairs: Iterable[tuple[int, int, Piece]]) -> Peers:
    found: Peers = {}
    for rank, other, piece in pairs:
        key = piece.stage, piece.microbatch, rank
        found[key] = (*found.get(key, ()), other)
    return found


@lru_cache(maxsize=64)
def cut(plan: Plan, batch_size: int) -> Cut:
    """Cut a global batch; one too small for its micro-batches and replicas gets fewer of them."""
    number = _microbatches(plan, batch_size)
    parts = tuple(
        {
            rank: tuple(order.share_rows(0, batch_size, number, stage.shares, replica))
            for replica, rank in enumerate(stage.ranks)
        }
        for stage in plan.stages
    )
    pieces = {
        (stage, k): tuple(_pieces(parts, stage, k))
        for stage in range(plan.last)
        for k in range(number)
    }
    return Cut(batch_size, number, parts, pieces)


def offsets(parts: Sequence[Range]) -> list[Range]:
    """Where each of `parts`, ranges of the whole batch, lies in a rank's own samples."""
    found, offset = [], 0
    for start, stop in parts:
        found.append((offset, offset + stop - start))
        offset += stop - start
    return found


def _microbatches(plan: Plan, batch_size: int) -> int:
    number, before = plan.microbatches, 0
    while number != before:
        before = number
        for stage in plan.stages:
            number = order.microbatches(batch_size, number, stage.shares)
    return number


def _pieces(
    parts: Sequence[dict[int, tuple[Range, ...]]], stage: int, microbatch: int
) -> Iterator[Piece]:
    # Both sides' ranges go through the micro-batch in order: what is past stays so.
    receivers = [(rank, ranges[microbatch]) for rank, ranges in parts[stage + 1].items()]
    passed = 0
    for sender, sent in parts[stage].items():
        first, last = sent[microbatch]
        while passed < len(receivers) and receivers[passed][1][1] <= first:
            passed += 1
        for receiver, (start, stop) in receivers[passed:]:
            if start >= last:
                break
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield Piece(
                    *(stage, microbatch, sender, receiver),
                    sent=(low - first, high - first),
                    received=(low - start, high - start),
                )
