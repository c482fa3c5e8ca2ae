"""What schedules are made of: actions, their text and CSV forms, and the messages they stand for.

The printed form of an action is its file form: `0F2` is the forward of micro-batch 2 on stage 0,
`1SEND_F3` the handing on of stage 1's activations, `0REDUCE` the reduction of stage 0's gradients.
"""

import csv
import io
import re
from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.errors import UsageError
from hvdtrain.parallel.cut import Cut

COMPUTE = ("F", "B", "I", "W")
BACKWARD = ("B", "I")  # what gives a stage's input gradients
WEIGHTS = ("B", "W")  # what gives a stage's weight gradients
SENDS = ("SEND_F", "SEND_B")
RECEIPTS = ("RECV_F", "RECV_B")
COMMUNICATION = frozenset((*SENDS, *RECEIPTS, "REDUCE"))
PER_MICROBATCH = ("LOAD", *COMPUTE, *SENDS, *RECEIPTS)
PER_STAGE = ("REDUCE", "STEP")
_SEND_FOR = {"RECV_F": "SEND_F", "RECV_B": "SEND_B"}

_FORM = re.compile(rf"(\d+)({'|'.join((*PER_MICROBATCH, *PER_STAGE))})(\d+)?")


class ScheduleError(UsageError):
    """A schedule that is no correct step of its plan."""


class Action(NamedTuple):
    """One thing a rank does: `kind` on `stage`, for one micro-batch or (None) for all.

    Per micro-batch:
        LOAD: bring images (first stage), labels (last stage), or both where there is one stage.
        F, B: forward; whole backward.
        I, W: the halves of a backward: gradients of the input, then of the weights.
        SEND_F, RECV_F: hand activations to the next stage; post the receipt of the input.
        SEND_B, RECV_B: hand input gradients to the stage before; post the receipt of gradients of
            the output. No SEND or RECV blocks: who needs the data waits, and the rank awaits
            the completion of its SENDs at its STEPs.

    Per stage:
        REDUCE: start the sum of the gradients over the replicas, once they are complete.
        STEP: wait for that sum and update.
    """

    stage: int
    kind: str
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


Schedule = dict[int, list[Action]]  # rank -> its actions, in order


def parse_action(text: str) -> Action:
    """The reverse of `str(action)`.

    Raises:
        UsageError: if the text is no action.
    """
    match = _FORM.fullmatch(text)
    if not match or (match[2] in PER_MICROBATCH) != (match[3] is not None):
        raise UsageError(f"{text!r} is no action: expected a form like 0F2 or 0REDUCE")
    return Action(int(match[1]), match[2], None if match[3] is None else int(match[3]))


def last_backward(actions: Sequence[Action], stage: int) -> Action | None:
    """The action of one rank after which the gradients of `stage` are complete."""
    return next((a for a in reversed(actions) if a.stage == stage and a.kind in WEIGHTS), None)


def inputs(action: Action, last: int) -> list[tuple[Action, ...]]:
    """What a compute action needs, in a plan whose last stage is `last`: one action of each tuple.

    What comes from another stage is named by the action that produces it.
    """
    stage, kind, k = action
    if kind == "F":
        return [(Action(stage - 1, "F", k),)] if stage else []
    if kind == "W":
        return [(Action(stage, "I", k),)]
    after = [(Action(stage + 1, "B", k), Action(stage + 1, "I", k))] if stage < last else []
    return [(Action(stage, "F", k),), *after]


def boundary(stage: int, kind: str) -> int:
    """What a SEND or RECV of `stage` crosses: boundary s lies between stages s and s + 1."""
    return stage if kind in ("SEND_F", "RECV_B") else stage - 1


def peers(cut: Cut, rank: int, action: Action) -> tuple[int, ...]:
    """The other ranks with which `rank` exchanges in a SEND or RECV; empty if there are none."""
    stage, kind, microbatch = action
    if kind in ("SEND_F", "RECV_B"):
        return cut.receivers.get((boundary(stage, kind), microbatch, rank), ())
    if kind in ("RECV_F", "SEND_B"):
        return cut.senders.get((boundary(stage, kind), microbatch, rank), ())
    return ()


def receipt_for(action: Action, last: int) -> Action | None:
    """The RECV whose data a compute action uses; None for what uses none of another stage."""
    stage, kind, k = action
    if kind == "F" and stage > 0:
        return Action(stage, "RECV_F", k)
    if kind in BACKWARD and stage < last:
        return Action(stage, "RECV_B", k)
    return None


def send_of(receipt: Action) -> Action:
    """The SEND of the neighbouring stage that a RECV is for."""
    stage, kind, k = receipt
    return Action(stage - 1 if kind == "RECV_F" else stage + 1, _SEND_FOR[kind], k)


def rows_handed(cut: Cut, sender: int, receiver: int, action: Action) -> int:
    """Samples that `sender` hands to `receiver` in a SEND of its."""
    assert action.microbatch is not None
    # A gradient goes the other way, from the stage behind.
    before, behind = (sender, receiver) if action.kind == "SEND_F" else (receiver, sender)
    return sum(
        piece.sent[1] - piece.sent[0]
        for piece in cut.pieces[boundary(action.stage, action.kind), action.microbatch]
        if (piece.sender, piece.receiver) == (before, behind)
    )


def tag(stage: int, kind: str, microbatch: int, microbatches: int) -> int:
    """The tag of the messages of a SEND or RECV, the same on both sides.

    Each (boundary, direction, micro-batch) has its own, whatever the ranks.
    """
    is_gradient = kind in ("SEND_B", "RECV_B")
    return (2 * boundary(stage, kind) + is_gradient) * microbatches + microbatch


def to_text(schedule: Schedule) -> str:
    """One line a rank: `0: 0LOAD0 0F0 0B0`."""
    lines = (f"{rank}: {' '.join(map(str, schedule[rank]))}".rstrip() for rank in sorted(schedule))
    return "".join(f"{line}\n" for line in lines)


def from_text(text: str) -> Schedule:
    """The reverse of `to_text`; empty lines are skipped.

    Raises:
        UsageError: naming what is no action, or the rank that is given twice.
    """
    rows = []
    for line in filter(str.strip, text.splitlines()):
        rank, _, actions = line.partition(":")
        rows.append([rank, *actions.split()])
    return _from_rows(rows)


def to_csv(schedule: Schedule) -> str:
    """One row a rank; the first cell is its number."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerows([rank, *map(str, schedule[rank])] for rank in sorted(schedule))
    return target.getvalue()


def from_csv(text: str) -> Schedule:
    """The reverse of `to_csv`; empty rows and empty cells are skipped.

    Raises:
        UsageError: naming what is no action, or the rank that is given twice.
    """
    rows = ([cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)))
    return _from_rows([[cell for cell in row if cell] for row in rows if any(row)])


def _from_rows(rows: Sequence[Sequence[str]]) -> Schedule:
    schedule: Schedule = {}
    for rank, *actions in rows:
        if not rank.strip().isdecimal():
            raise UsageError(f"a line of a schedule starts with its rank, not with {rank!r}")
        if int(rank) in schedule:
            raise UsageError(f"the schedule gives rank {int(rank)} twice")
        schedule[int(rank)] = [parse_action(action) for action in actions]
    return schedule
