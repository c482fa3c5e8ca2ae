"""A schedule is data: for each rank, the list of actions that make up one step.

The printed form of an action is its file form: `0F2` is the forward of micro-batch 2 on stage 0,
`0REDUCE` the reduction of stage 0's gradients. Nothing here knows of processes or tensors.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.errors import UsageError

# Kinds that work on one micro-batch, then kinds that work on a stage as a whole.
PER_MICROBATCH = ("LOAD", "F", "B")
PER_STAGE = ("REDUCE", "STEP")


class Action(NamedTuple):
    """One thing a rank does: `kind` on `stage`, for one micro-batch or (None) for all."""

    stage: int
    kind: str
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


def parse_action(text: str) -> Action:
    """The reverse of `str(action)`.

    Raises:
        UsageError: if the text is no action.
    """
    kinds = "|".join((*PER_MICROBATCH, *PER_STAGE))
    match = re.fullmatch(rf"(\d+)({kinds})(\d+)?", text)
    if not match or (match[2] in PER_MICROBATCH) != (match[3] is not None):
        raise UsageError(f"{text!r} is no action: expected a form like 0F2 or 0REDUCE")
    return Action(int(match[1]), match[2], None if match[3] is None else int(match[3]))


def training_step(microbatches: int) -> list[Action]:
    """One step of a plan of one stage: each micro-batch forward and backward, then the update.

    With one stage there is nothing to wait for, so a micro-batch's backward follows its forward
    and its activations are gone before the next one is loaded.
    """
    actions = []
    for k in range(microbatches):
        actions += [Action(0, "LOAD", k), Action(0, "F", k), Action(0, "B", k)]
    return [*actions, Action(0, "REDUCE"), Action(0, "STEP")]


def evaluation(microbatches: int) -> list[Action]:
    """A forward-only schedule."""
    return [Action(0, kind, k) for k in range(microbatches) for kind in ("LOAD", "F")]


def last_backward(actions: Sequence[Action]) -> Action | None:
    """The backward after which a stage's gradients are complete."""
    backwards = [action for action in actions if action.kind == "B"]
    return backwards[-1] if backwards else None
