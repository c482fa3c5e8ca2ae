"""The loop over batches that leaves, with its state saved, when a scheduler or a user stops it."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.errors import Interrupted, Preempted, UsageError
from hvdtrain.host.stop import StopRequest
from hvdtrain.torch import state as states
from hvdtrain.torch.checkpoint import check_folder, save
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
