"""Actions, the elements of schedules: their printed form, and the messages they send.

`0F2` is the forward of micro-batch 2 on stage 0, `1SEND_F3` sends stage 1's activations of
micro-batch 3, `0REDUCE` reduces stage 0's gradients. `plan show --actions` writes them so.
"""

import csv
import io
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hvdtrain.errors import UsageError
from hvdtrain.plan.cut import Cut

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
