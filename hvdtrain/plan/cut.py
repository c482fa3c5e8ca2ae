"""Cuts of a global batch: the samples of each rank, the rows that it transfers, its actions.

Micro-batch k is the k-th contiguous slice of the batch, and the replicas of each stage take
contiguous ranges of it. Where two neighbouring stages cut it differently, a replica sends each
replica of the next stage the overlap of their ranges.

Actions are the elements of schedules. `0F2` is the forward of micro-batch 2 on stage 0, `1SEND_F3`
sends stage 1's activations of micro-batch 3, `0REDUCE` reduces stage 0's gradients. `plan show
--actions` writes them so.
"""

import csv
import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from hvdtrain.data import order
from hvdtrain.errors import UsageError
from hvdtrain.plan.plan import Plan

Range = tuple[int, int]  # [start, stop)


@dataclass(frozen=True)
class Piece:
    """Rows of a micro-batch that `sender` (of `stage`) sends to `receiver` (of the next stage).

    Gradients of the same rows come back the same way.

    Attributes:
        sent: the rows, relative to the sender's range of the micro-batch.
        received: the same rows, relative to the receiver's range.
    """

    stage: int
    microbatch: int
    sender: int
    receiver: int
    sent: Range
    received: Range

    @property
    def is_local(self) -> bool:
        """Return whether nothing has to be sent, because one rank holds both stages."""
        return self.sender == self.receiver


@dataclass(frozen=True)
class Share:
    """A replica's share of a batch, the weight of its running statistics.

    Attributes:
        weight: its samples divided by those of the whole batch.
        first: whether it is the first replica of its stage with samples.
        samples: of the replica.
    """

    weight: float
    first: bool
    samples: int = 0


@dataclass(frozen=True)
class Cut:
    """A batch of `batch_size` samples, cut for a plan.

    Attributes:
        microbatches: the number of micro-batches.
        parts: per stage, by rank: its samples of each micro-batch, as ranges relative to the
            start of the batch.
        pieces: the transferred rows by (stage, micro-batch), local pieces included.
    """

    batch_size: int
    microbatches: int
    parts: tuple[dict[int, tuple[Range, ...]], ...]
    pieces: dict[tuple[int, int], tuple[Piece, ...]]

    @cached_property
    def receivers(self) -> "Peers":
        """The other ranks to which a rank sends rows."""
        return _by_rank((piece.sender, piece.receiver, piece) for piece in self._sent())

    @cached_property
    def senders(self) -> "Peers":
        """The other ranks from which a rank receives rows."""
        return _by_rank((piece.receiver, piece.sender, piece) for piece in self._sent())

    @cached_property
    def kept(self) -> frozenset[tuple[int, int | None, int]]:
        """The (boundary, micro-batch, rank) at which a rank that holds both stages keeps rows."""
        return frozenset((p.stage, p.microbatch, p.sender) for p in self._all() if p.is_local)

    def _sent(self) -> Iterator[Piece]:
        return (piece for piece in self._all() if not piece.is_local)

    def _all(self) -> Iterator[Piece]:
        return (piece for pieces in self.pieces.values() for piece in pieces)

    @cached_property
    def like(self) -> tuple[int, ...]:
        """The first micro-batch that is cut as each micro-batch is, in all stages."""
        first: dict[tuple[int, ...], int] = {}
        counts = (
            tuple(ranges[k][1] - ranges[k][0] for part in self.parts for ranges in part.values())
            for k in range(self.microbatches)
        )
        return tuple(first.setdefault(count, k) for k, count in enumerate(counts))

    def rows(self, stage: int, rank: int, microbatch: int) -> int:
        """Return the number of samples of a micro-batch that `rank` works on in `stage`."""
        start, stop = self.parts[stage][rank][microbatch]
        return stop - start

    def samples(self, stage: int, rank: int) -> int:
        """Return the number of samples of the batch that `rank` works on in `stage`, maybe 0."""
        return sum(stop - start for start, stop in self.parts[stage].get(rank, ()))

    def share(self, stage: int, rank: int) -> Share:
        """Return the share of the batch that `rank` works on in `stage`."""
        first = next(other for other in self.parts[stage] if self.samples(stage, other))
        samples = self.samples(stage, rank)
        return Share(samples / self.batch_size, rank == first, samples)


# By (boundary, micro-batch, rank); boundary s lies between stages s and s + 1.
Peers = dict[tuple[int, int | None, int], tuple[int, ...]]


def _by_rank(pairs: Iterable[tuple[int, int, Piece]]) -> Peers:
    peers: Peers = {}
    for rank, other, piece in pairs:
        key = piece.stage, piece.microbatch, rank
        peers[key] = (*peers.get(key, ()), other)
    return peers


@lru_cache(maxsize=64)
def cut(plan: Plan, batch_size: int) -> Cut:
    """Cut a global batch; use fewer micro-batches if it is too small for the plan's number."""
    number, before = plan.microbatches, 0
    while number != before:
        before = number
        for stage in plan.stages:
            number = order.microbatches(batch_size, number, stage.shares)
    rows = {
        shares: [tuple(ranges) for ranges in order.replica_rows(0, batch_size, number, shares)]
        for shares in {stage.shares for stage in plan.stages}
    }
    parts = tuple(dict(zip(stage.ranks, rows[stage.shares], strict=True)) for stage in plan.stages)
    pieces = {
        (stage, k): tuple(_pieces(parts, stage, k))
        for stage in range(plan.last)
        for k in range(number)
    }
    return Cut(batch_size, number, parts, pieces)


def offsets(parts: Sequence[Range]) -> list[Range]:
    """Return the place of each of `parts`, ranges of the whole batch, in the rank's samples."""
    ranges, offset = [], 0
    for start, stop in parts:
        ranges.append((offset, offset + stop - start))
        offset += stop - start
    return ranges


def _pieces(
    parts: Sequence[dict[int, tuple[Range, ...]]], stage: int, microbatch: int
) -> Iterator[Piece]:
    # The ranges of both stages ascend: a receiver that ends before a sender's range starts ends
    # before those of all later senders too.
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
                    stage,
                    microbatch,
                    sender,
                    receiver,
                    sent=(low - first, high - first),
                    received=(low - start, high - start),
                )


Groups = tuple[tuple[Range, ...], ...]  # per replica: ranges of samples normalised together


def groups_of(plan: Plan, pieces: Cut, stage: int, is_synchronised: bool) -> Groups:
    """Return the groups of a stage: per replica, or one set for all if synchronised."""
    parts = list(pieces.parts[stage].values())
    if is_synchronised:
        microbatches = zip(*parts, strict=True)
        parts = [tuple((ranges[0][0], ranges[-1][1]) for ranges in microbatches)]
    return tuple(tuple(r for r in ranges if r[0] < r[1]) for ranges in parts)


def is_same(
    before: Plan, after: Plan, sizes: Collection[int], normed: Collection[str], is_synced: bool
) -> bool:
    """Return whether batch norm, running statistics included, computes the same under both plans.

    Args:
        sizes: the batch sizes to compare.
        normed: the components that have batch norms.
    """
    return all(
        _by_component(before, size, normed, is_synced)
        == _by_component(after, size, normed, is_synced)
        for size in sizes
    )


def _by_component(
    plan: Plan, size: int, normed: Collection[str], is_synced: bool
) -> dict[str, Groups]:
    pieces = cut(plan, size)
    return {
        name: groups_of(plan, pieces, number, is_synced)
        for number, stage in enumerate(plan.stages)
        for name in stage.components
        if name in normed
    }


def sample_counts(
    plan: Plan, pieces: Cut, normed: Collection[str], synchronised: Collection[int]
) -> list[int]:
    """Return the sizes of the groups, ascending; an empty list without batch norms."""
    counts = {
        stop - start
        for number, stage in enumerate(plan.stages)
        if any(name in normed for name in stage.components)
        for ranges in groups_of(plan, pieces, number, number in synchronised)
        for start, stop in ranges
    }
    return sorted(counts)


COMPUTE = ("F", "B", "I", "W")
BACKWARD = ("B", "I")  # compute a stage's input gradients
WEIGHTS = ("B", "W")  # compute a stage's weight gradients
SENDS = ("SEND_F", "SEND_B")
RECEIPTS = ("RECV_F", "RECV_B")
COMMUNICATION = frozenset((*SENDS, *RECEIPTS, "REDUCE"))
_OTHER_SIDE = {"SEND_F": "RECV_F", "SEND_B": "RECV_B", "RECV_F": "SEND_F", "RECV_B": "SEND_B"}
_UPSTREAM = ("SEND_F", "RECV_B")  # of the stage before a boundary; activations flow downstream

MOST_CACHED = 2**16  # actions whose neighbours are kept: many ranks run the same ones


class ScheduleError(UsageError):
    """A schedule that is not a correct step of its plan."""


class Action(NamedTuple):
    """One action of a rank: `kind` on `stage`, for one micro-batch or (None) for all.

    Per micro-batch:
        LOAD: load images (first stage), labels (last stage), or both if there is one stage.
        F, B: forward; whole backward.
        I, W: the halves of a backward: gradients of the input, then of the weights.
        SEND_F, RECV_F: send activations to the next stage; post the receipt of the input.
        SEND_B, RECV_B: send input gradients to the previous stage; post the receipt of gradients
            of the output. No SEND or RECV blocks: the action that needs the data waits, and the
            rank waits for the completion of its SENDs in its STEPs.

    Per stage:
        REDUCE: start those sums of gradients over the replicas that the last backward has not
            started; they are complete then.
        STEP: wait for that sum and update.
    """

    stage: int
    kind: str
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


Schedule = dict[int, list[Action]]  # rank -> its actions, in order


def last_backward(actions: Sequence[Action], stage: int) -> Action | None:
    """Return the action of one rank after which the gradients of `stage` are complete."""
    return next((a for a in reversed(actions) if a.stage == stage and a.kind in WEIGHTS), None)


@lru_cache(MOST_CACHED)
def inputs(action: Action, last: int) -> tuple[tuple[Action, ...], ...]:
    """Return the inputs of a compute action in a plan whose last stage is `last`.

    The action needs one action of each tuple. Data of another stage is represented by the action
    that computes it.
    """
    stage, kind, k = action
    if kind == "F":
        return ((Action(stage - 1, "F", k),),) if stage else ()
    if kind == "W":
        return ((Action(stage, "I", k),),)
    after = ((Action(stage + 1, "B", k), Action(stage + 1, "I", k)),) if stage < last else ()
    return ((Action(stage, "F", k),), *after)


def boundary(stage: int, kind: str) -> int:
    """Return the boundary that a SEND or RECV of `stage` crosses.

    Boundary s lies between stages s and s + 1.
    """
    return stage if kind in _UPSTREAM else stage - 1


def is_upstream(action: Action) -> bool:
    """Return whether the stage of a SEND or RECV is the one before the crossed boundary."""
    return action.kind in _UPSTREAM


def peers(cut: Cut, rank: int, action: Action) -> tuple[int, ...]:
    """Return the other ranks with which `rank` exchanges in a SEND or RECV; possibly none."""
    if action.kind not in _OTHER_SIDE:
        return ()
    known = cut.receivers if is_upstream(action) else cut.senders
    return known.get((boundary(action.stage, action.kind), action.microbatch, rank), ())


@lru_cache(MOST_CACHED)
def receipt_for(action: Action, last: int) -> Action | None:
    """Return the RECV whose data a compute action uses; None if it uses no other stage's data."""
    stage, kind, k = action
    if kind == "F" and stage > 0:
        return Action(stage, "RECV_F", k)
    if kind in BACKWARD and stage < last:
        return Action(stage, "RECV_B", k)
    return None


def send_after(action: Action, last: int) -> Action | None:
    """Return the SEND of a compute action's result; None if no other stage uses the result."""
    stage, kind, k = action
    if kind == "F" and stage < last:
        return Action(stage, "SEND_F", k)
    if kind in BACKWARD and stage > 0:
        return Action(stage, "SEND_B", k)
    return None


@lru_cache(MOST_CACHED)
def partner(action: Action) -> Action:
    """Return the neighbouring stage's RECV of a SEND, or its SEND of a RECV."""
    stage, kind, k = action
    return Action(stage + 1 if is_upstream(action) else stage - 1, _OTHER_SIDE[kind], k)


def rows_sent(cut: Cut, sender: int, receiver: int, action: Action) -> int:
    """Return the number of samples that `sender` sends to `receiver` in its SEND `action`."""
    assert action.microbatch is not None
    # Gradients go the other way, from the later stage.
    before, behind = (sender, receiver) if action.kind == "SEND_F" else (receiver, sender)
    return sum(
        piece.sent[1] - piece.sent[0]
        for piece in cut.pieces[boundary(action.stage, action.kind), action.microbatch]
        if (piece.sender, piece.receiver) == (before, behind)
    )


def tag(stage: int, kind: str, microbatch: int, microbatches: int) -> int:
    """Return the message tag of a SEND or RECV, the same on both sides.

    Each (boundary, direction, micro-batch) has a different tag, independent of the ranks.
    """
    is_gradient = kind in ("SEND_B", "RECV_B")
    return (2 * boundary(stage, kind) + is_gradient) * microbatches + microbatch


def to_csv(schedule: Schedule) -> str:
    """Return the schedule as CSV, one row per rank; the first cell is the rank."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerows([rank, *map(str, schedule[rank])] for rank in sorted(schedule))
    return target.getvalue()
