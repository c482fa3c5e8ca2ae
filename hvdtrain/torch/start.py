"""The start and the end of a user's program on its ranks, and the watch over its optimizers."""

import atexit
import multiprocessing
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hvdtrain import world
from hvdtrain.device import choose_device
from hvdtrain.errors import HvdtrainError, Interrupted, Preempted, UsageError
from hvdtrain.health import failure
from hvdtrain.host.process import STOP_SIGNALS
from hvdtrain.options.sections import Library
from hvdtrain.sync.collectives import reduction_library, remarks
from hvdtrain.torch import state as states
from hvdtrain.torch.agreement import Action, Agreement, Note
from hvdtrain.torch.alike import check_models
from hvdtrain.torch.state import Rank, State, Watched
from hvdtrain.world import World

STALL_SECONDS = 1800.0
IN_A_CHILD = (
    "distributed.start() is called again in a child process, as a spawned worker of a DataLoader "
    'imports the program: put its code under `if __name__ == "__main__":`'
)


def start(
    threads: int | None = None,
    allreduce: str = "auto",
    device: str | None = None,
    stall_timeout: float = STALL_SECONDS,
    reduce_with: Library | None = None,
) -> Rank:
    """Join the ranks that the launcher started, or be a world of one; call it first.

    PyTorch gets the threads of this rank. From now on an exception on one rank ends the job on all
    ranks: an error that you can correct in one line, with the exit code of its kind. A second call
    changes nothing and returns the same.

    Args:
        threads: of this rank; default: its share of the cores.
        allreduce: "ring" requests the ring algorithm of the MPI library, "auto" lets it choose.
        device: "cpu" or "cuda"; default: the rank's GPU if there is one.
        stall_timeout: seconds to wait for the other ranks before the job ends.
        reduce_with: "horovod" or "mpi", which sums gradients; default: Horovod if all ranks have
            it, else MPI.

    Raises:
        UsageError: if MPI is missing, there is no such device, or the launcher does not
            connect its processes by MPI, as torchrun.
    """
    if states.is_started():
        return states.current().place
    sys.excepthook = _end_all
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False) or multiprocessing.parent_process() is not None:
        raise UsageError(IN_A_CHILD)
    joined = _join(allreduce, threads)
    torch.set_num_threads(joined.threads)
    chosen = choose_device(device, joined, "device")
    place = Rank(joined.rank, joined.size, joined.local_rank, joined.local_size, chosen)
    library = reduction_library(reduce_with, joined) if joined.size > 1 else "mpi"
    notes = remarks(reduce_with, joined)
    state = State(joined, place, Agreement(joined, stall_timeout), library)
    for note in notes:
        state.remark(note)
    before = register_optimizer_step_pre_hook(_before_step)
    after = register_optimizer_step_post_hook(_after_step)
    state.undo += [before.remove, after.remove, state.agreement.close]
    states.enter(state)
    leave_together_at_exit()
    return place


def _end_all(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End the job on all ranks after an uncaught exception of one, or of all if they stop."""
    error = _explained(error)
    if not isinstance(error, (Interrupted, Preempted)) or not states.is_started():
        failure.fail(error)
    # All ranks end this way. Schedulers send their signal more than once.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if states.current().place.is_first:
        print(f"hvdtrain: {error}", file=sys.stderr, flush=True)
    sys.exit(error.exit_code)


def _explained(error: BaseException) -> BaseException:
    """Return an error that says what to do, in place of PyTorch's."""
    if "Expected more than 1 value per channel" in str(error):
        return UsageError(
            "batch norm has one value per channel in a rank's share of a batch: use a larger "
            "batch_size, fewer ranks, or drop_last=True if it is the last batch of an epoch"
        )
    if "DataLoader worker" in str(error) and " exit code 2." in str(error.__cause__):
        return UsageError(IN_A_CHILD)
    return error


def _join(allreduce: str, threads: int | None) -> World:
    try:
        return world.current()
    except RuntimeError:
        return world.start(allreduce, threads)


def leave_together() -> None:
    """Wait at the end of the program for all ranks, unless one still trains: then end the job."""
    if not states.is_started():
        return
    state = states.current()
    try:
        for model in state.models:
            model.check_steps()
        # One rank may have changed its weights after the last step, as to export the best ones.
        are_as_stepped = all(model.is_as_stepped for model in state.models)
        check_models(state, Note(Action.LEAVING), are_as_stepped)
    except HvdtrainError as error:
        failure.fail(error)
    states.enter(None)


def leave_together_at_exit() -> None:
    """Have `leave_together` called before Horovod ends, which would end the other ranks' steps."""
    atexit.unregister(leave_together)
    atexit.register(leave_together)


def stop() -> None:
    """Undo `start`: end the watch over optimizers and prepared models. Collective.

    Programs need no call of it: it is for a process that continues with something else.
    """
    if states.is_started():
        atexit.unregister(leave_together)
        state = states.current()
        for undo in reversed(state.undo):
            undo()
        states.enter(None)


@contextmanager
def alone() -> Iterator[None]:
    """Allow optimizers inside the block that were not given to `prepare`.

    Their models then differ between ranks, as when each rank fits a small model of its own.
    """
    state = states.current()
    before, state.exempt = state.exempt, True
    try:
        yield
    finally:
        state.exempt = before


def _before_step(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    state = states.current()
    model = _model_of(state, optimizer)
    # torch passes the optimizer itself as the first argument.
    has_closure = any(map(callable, [*args[1:], *kwargs.values()]))
    if model is not None:
        model.before_step(has_closure)
        if has_closure:
            whole = model.of_all_ranks
            replaced = (args[0], *(whole(v) if callable(v) else v for v in args[1:]))
            return replaced, {k: whole(v) if callable(v) else v for k, v in kwargs.items()}
    elif state.place.size > 1 and not state.exempt:
        _refuse(state, optimizer)
    return None


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    model = _model_of(states.current(), optimizer)
    if model is not None:
        model.after_step()


def _model_of(state: State, optimizer: Any) -> Watched | None:
    for model in state.models:
        if any(optimizer is known for known in model.optimizers):
            return model
    return None


def _refuse(state: State, optimizer: Any) -> None:
    name = type(optimizer).__name__
    stepped = {id(value) for group in optimizer.param_groups for value in group["params"]}
    if any(id(value) in stepped for model in state.models for value in model.parameters):
        raise UsageError(
            f"an optimizer {name} steps a prepared model, but was not given to prepare: call "
            "model, optimizer = distributed.prepare(model, optimizer) with it"
        )
    raise UsageError(
        f"an optimizer {name} steps a model that was not prepared, so each rank would train "
        "alone: call model, optimizer = distributed.prepare(model, optimizer), or step it inside "
        "`with distributed.alone():` if that is intended"
    )
