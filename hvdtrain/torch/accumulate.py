"""Accumulation and clipping of gradients in a user's loop."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hvdtrain.errors import UsageError
from hvdtrain.torch import state as states
from hvdtrain.torch.gradients import Phase, Replica


@contextmanager
def accumulate(active: bool = True) -> Iterator[None]:
    """Add up the gradients of backwards inside the block without averaging them.

    The first backward outside of it averages the sum of all of them. Use it for all micro-batches
    of a step but the last:

        with distributed.accumulate(number % 4 != 0):
            (loss / 4).backward()

    Args:
        active: False makes the block an ordinary one.
    """
    state = states.current()
    before, state.accumulating = state.accumulating, state.accumulating or active
    try:
        yield
    finally:
        state.accumulating = before


@contextmanager
def weight(part: float | Tensor, whole: float | Tensor | None = None) -> Iterator[None]:
    """Give the weight of this rank's loss in backwards inside the block.

    A rank's loss usually is the mean over its samples, which hvdtrain counts. If it is divided by
    something else, as with weights of classes or with `ignore_index`, give the divisor:

        with distributed.weight(class_weights[labels].sum()):
            loss.backward()

    Args:
        part: the number that the loss of this rank is divided by; the loss counts by its share of
            the sum over all ranks.
        whole: in place of this sum; `weight(1, 1)` adds up the losses of all ranks.

    Raises:
        UsageError: if a number is negative or not finite, or `whole` is 0.
    """
    numbers = float(part), None if whole is None else float(whole)
    if (
        not 0 <= numbers[0] < math.inf
        or not 0 < (1.0 if numbers[1] is None else numbers[1]) < math.inf
    ):
        raise UsageError(
            f"weight({part}, {whole}) is not possible: give finite numbers, not below 0"
        )
    state = states.current()
    before, state.loss_weight = state.loss_weight, numbers
    try:
        yield
    finally:
        state.loss_weight = before


def clip_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the averaged gradients down to a norm of at most `max_norm`; return the norm before.

    It is `torch.nn.utils.clip_grad_norm_`, called once per step after the last backward. The norm
    is that of the global batch, the same on all ranks.

    Raises:
        UsageError: if gradients were only accumulated, so that each rank has its own.
    """
    values = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    clipped = {id(value) for value in values}
    for model in states.current().models:
        assert isinstance(model, Replica)
        if model.phase is Phase.ACCUMULATED and any(id(p) in clipped for p in model.parameters):
            raise UsageError(
                "clip_norm_ needs averaged gradients, and these were only accumulated: call it "
                "after the last backward of a step, outside of `with distributed.accumulate():`"
            )
    return torch.nn.utils.clip_grad_norm_(values, max_norm, norm_type)
