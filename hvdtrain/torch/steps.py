"""Loops over batches: cut into micro-batches, and left with the state saved after a signal."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvdtrain.errors import Interrupted, Preempted, UsageError
from hvdtrain.host.process import StopRequest
from hvdtrain.torch import state as states
from hvdtrain.torch.checkpoint import check_folder, save
from hvdtrain.torch.gradients import Phase, Replica
from hvdtrain.torch.state import State

Item = TypeVar("Item")


def steps(
    batches: Iterable[Item],
    save_to: str | Path | None = None,
    *,
    every: int | None = None,
    keep: int = 2,
    **others: Any,
) -> Iterator[Item]:
    """Yield the batches; stop after a step, on all ranks, when a rank is requested to.

    Requests are Ctrl-C and the signals of schedulers: SIGTERM, SIGUSR1, SIGUSR2 and SIGHUP. The
    ranks agree on them in each backward. The state is saved, and the program ends with exit code
    75, or 130 after Ctrl-C. A second Ctrl-C ends it at once. From the first call on requests are
    kept until the next step, also during an evaluation.

    Args:
        batches: this rank's batches of an epoch.
        save_to: the folder of checkpoints; None saves nothing.
        every: steps between checkpoints; None saves only before it stops.
        keep: newest checkpoints to keep.
        others: further objects to save, as in `save`.

    Raises:
        Preempted, Interrupted: on all ranks, after the state is saved.
        UsageError: if `every` is given and `save_to` is not, or the folder has a checkpoint of a
            later step and was not loaded.
    """
    if every is not None and (save_to is None or every < 1):
        raise UsageError("steps saves every N steps, at least 1, to a folder: give save_to")
    state = states.current()
    stop = _watch(state)
    before = _steps(state)
    if save_to is not None and state.models:
        check_folder(save_to)
    for batch in batches:
        yield batch
        if state.place.size == 1 and stop.requested:
            state.stop_code = (Interrupted if stop.interrupted else Preempted).exit_code
        if state.stop_code is not None:
            _leave(state, save_to, keep, others)
        if every is not None and save_to is not None and _steps(state) - before >= every:
            before = _steps(state)
            save(save_to, keep=keep, **others)


def _watch(state: State) -> StopRequest:
    """Return what records requests to stop, from now until the end of the program."""
    if state.stop is None:
        state.stop = StopRequest().__enter__()
        state.undo.append(state.stop.__exit__)
    return state.stop


def _steps(state: State) -> int:
    return state.models[0].steps if state.models else 0


def _leave(state: State, save_to: str | Path | None, keep: int, others: dict[str, Any]) -> None:
    kind = Interrupted if state.stop_code == Interrupted.exit_code else Preempted
    what = "interrupted" if kind is Interrupted else "requested to stop"
    where = f"{what} after step {_steps(state)}"
    if save_to is None or not state.models:
        raise kind(f"{where}; nothing was saved: give save_to to distributed.steps")
    path = save(save_to, keep=keep, **others)
    raise kind(f"{where}; the state is in {path}: start again to resume")


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
