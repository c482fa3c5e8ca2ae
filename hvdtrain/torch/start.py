"""The start, the state and the end of a user's program, and the watch over its optimizers."""

import atexit
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hvdtrain import world
from hvdtrain.device import choose_device
from hvdtrain.engine.agreement import Agreement, check_digests
from hvdtrain.errors import CheckFailed, HvdtrainError, Interrupted, Preempted, UsageError
from hvdtrain.health import failure
from hvdtrain.host.process import STOP_SIGNALS, StopRequest
from hvdtrain.options.sections import Library
from hvdtrain.sync.collectives import reduction_library, remarks
from hvdtrain.sync.states import Kept, fingerprint
from hvdtrain.torch.reading import Batch, Reading
from hvdtrain.world import World

STALL_SECONDS = 1800.0
SAME_CALLS = (
    "make the same steps, evaluations and saves on all ranks (distributed.loader and "
    "distributed.sampler yield the same number of batches on each)"
)
IN_A_CHILD = (
    "distributed.start() is called again in a child process, as a spawned worker of a DataLoader "
    'imports the program: put its code under `if __name__ == "__main__":`'
)


@dataclass(frozen=True)
class Rank:
    """The place of this process in the job.

    Attributes:
        rank, size: number of this rank, and of all ranks.
        local_rank, local_size: the same among the ranks of this host.
        device: the CPU, or the GPU of this rank: local rank modulo visible GPUs.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which prints and writes."""
        return self.rank == 0


class Watched(Protocol):
    """A prepared model, as the checks of optimizers and of epochs see it.

    Attributes:
        kept: what its compressed sums keep from step to step.
    """

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    parameters: list[nn.Parameter]
    steps: int
    kept: Kept

    @property
    def is_as_stepped(self) -> bool:
        """Return whether the weights are those of the last step, the same on all ranks."""

    def of_all_ranks(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return a closure that returns the loss of the global batch."""

    def before_step(self, with_closure: bool) -> None:
        """Refuse a step that would be wrong."""

    def after_step(self) -> None:
        """Count a step."""

    def check_steps(self) -> None:
        """Refuse a loop that never steps."""

    def meet(self) -> None:
        """Let ranks with local steps agree. Collective."""


@dataclass
class State:
    """The state of a program between `start` and its end.

    Attributes:
        engine: the library that sums the gradients.
        models: prepared so far, in order.
        prepared: number of calls of `prepare`.
        positions: samples consumed, by name of their order.
        restored: whether `positions` are those of a checkpoint, and none has been read yet.
        loaded: folders of checkpoints that `load` has read.
        readings: iterations over training batches, of loaders and samplers, the last one last.
        evaluation: the last iteration over batches for evaluation.
        contents: checksum of the data set that was iterated last, as far as is seen.
        loss_weight: weight of this rank's backwards and of all ranks', inside of `weight`.
        accumulating: whether backward adds to this rank's gradients without averaging them.
        exempt: whether optimizers may step outside of `prepare`.
        remarks: made so far.
        stop: catches signals in `steps`.
        stop_code: exit code on which the ranks have agreed; None to continue.
        undo: called at the end, in reverse order.
    """

    world: World
    place: Rank
    agreement: Agreement
    engine: Library = "horovod"
    models: list[Watched] = field(default_factory=list)
    prepared: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    restored: bool = False
    loaded: set[Path] = field(default_factory=set)
    readings: list[Reading] = field(default_factory=list)
    evaluation: Reading | None = None
    contents: int = 0
    loss_weight: tuple[float, float | None] | None = None
    accumulating: bool = False
    exempt: bool = False
    remarks: set[str] = field(default_factory=set)
    stop: StopRequest | None = None
    stop_code: int | None = None
    undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Steps of the first model, by which checkpoints are called."""
        return self.models[0].steps if self.models else 0

    @property
    def module(self) -> nn.Module:
        """The prepared models as one: several have their numbers in front of their names."""
        modules = [model.model for model in self.models]
        return modules[0] if len(modules) == 1 else nn.ModuleList(modules)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of all models."""
        return [optimizer for model in self.models for optimizer in model.optimizers]

    def position(self, source: str) -> int:
        """Return the samples consumed of an order of samples.

        Raises:
            UsageError: if a checkpoint was loaded that does not know the order.
        """
        for one in self.readings:  # a loop that is over may have skipped the last batches
            end = len(one.batches)
            if 0 < one.used < end and not one.is_live and one.number >= end:
                one.used = end
                self.positions |= one.position
        if source in self.positions:
            self.restored = False  # another data set may be opened later, as for a second phase
        elif self.restored:
            raise UsageError(
                f"the loaded checkpoint was trained on other data than {source}: use the same "
                "data set, seed and holdout, or save to another folder"
            )
        return self.positions.setdefault(source, 0)

    def read(self, reading: Reading) -> None:
        """Note that a loop over training batches starts."""
        going_on = [r for r in self.readings if r.is_live and r.used < len(r.batches)]
        self.readings = [*going_on, reading]

    def use_batch(self) -> Batch | None:
        """Return the batch of a backward that runs now; None if the loop reads none.

        Raises:
            UsageError: if it is not known.
        """
        # An iterator of an earlier look at a batch may still live: the last one per order counts.
        live = {one.batches[0].source: one for one in self.readings if one.is_live}
        readings = [*live.values()] or self.readings[-1:]
        batches = [batch for one in readings if (batch := one.use()) is not None]
        for batch in batches[:-1] if self.loss_weight is None else ():
            if batch.weight != batches[-1].weight:
                raise UsageError(
                    f"two sets are read at once, and this rank has {batch.samples} of "
                    f"{batch.total} samples of one and {batches[-1].samples} of "
                    f"{batches[-1].total} of the other: run a backward for each, inside "
                    "`with distributed.weight(samples):`"
                )
        return batches[-1] if batches else None

    def remark(self, text: str) -> None:
        """Print a line once, on rank 0."""
        if self.place.is_first and text not in self.remarks:
            print(f"hvdtrain: {text}", file=sys.stderr)
        self.remarks.add(text)

    def compare_contents(self, contents: Sequence[int]) -> None:
        """Remark on data sets that differ between ranks."""
        if len(set(contents)) > 1:
            self.remark(
                "the ranks have different samples in their data sets, and each trains or is "
                "evaluated on its share of its own: give distributed.sampler the whole data set "
                "on every rank, since it divides each batch"
            )

    @property
    def saving(self) -> str:
        """The action of all ranks that save now, in words."""
        return f"saving after step {self.steps}"

    def check_weights(self, action: str, weights: Mapping[str, Tensor]) -> None:
        """Compare the weights of all ranks that give any. Collective.

        Raises:
            CheckFailed: on all ranks, if they differ.
        """
        number = fingerprint(weights.values()) if self.place.size > 1 else 0
        notes = self.agreement.exchange(action, fingerprint=number)
        if len({note.fingerprint for note in notes if note.fingerprint}) > 1:
            self.raise_difference(action, weights)

    def raise_difference(self, action: str, weights: Mapping[str, Tensor]) -> NoReturn:
        """Name the first weight that differs between ranks. Collective.

        Raises:
            CheckFailed: on all ranks.
        """
        digests = {name: fingerprint([value]) for name, value in weights.items()}
        check_digests(
            self.agreement.gather(action, digests),
            ": load weights before prepare or on all ranks, change none on one rank only, and "
            "decide by numbers that are the same on all ranks, as of distributed.total",
        )
        raise CheckFailed("the ranks hold different weights: change none on one rank only")

    def note_positions(self, at_ends: bool = False) -> None:
        """Set the positions to the batches that were used; `at_ends`: only to the last ones."""
        for one in self.readings:
            if not at_ends or one.used == len(one.batches):
                self.positions |= one.position


_state: State | None = None


def current() -> State:
    """Return the state that `start` made.

    Raises:
        UsageError: if `start` has not been called.
    """
    if _state is None:
        failure.end_all_on_exception()  # as `start` does: the error is one line
        raise UsageError("hvdtrain.torch is not started: call distributed.start() first")
    return _state


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
        reduce_with: "horovod", "mpi" or "torch" (torch.distributed), which sums gradients;
            default: Horovod if all ranks have it, else MPI, and on GPUs torch.distributed.

    Raises:
        UsageError: if MPI is missing, there is no such device, or the launcher does not
            connect its processes by MPI, as torchrun.
    """
    global _state
    if _state is not None:
        return _state.place
    sys.excepthook = _end_all
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False) or multiprocessing.parent_process() is not None:
        raise UsageError(IN_A_CHILD)
    try:
        joined = world.current()
    except RuntimeError:
        joined = world.start(allreduce, threads, by_torch=True)
    torch.set_num_threads(joined.threads)
    chosen = choose_device(device, joined, "device")
    place = Rank(joined.rank, joined.size, joined.local_rank, joined.local_size, chosen)
    library = reduction_library(reduce_with, joined, chosen) if joined.size > 1 else "mpi"
    notes = remarks(reduce_with, joined, chosen)
    _state = State(joined, place, Agreement(joined, SAME_CALLS, stall_timeout), library)
    for note in notes:
        _state.remark(note)
    before = register_optimizer_step_pre_hook(_before_step)
    after = register_optimizer_step_post_hook(_after_step)
    _state.undo += [before.remove, after.remove, _state.agreement.close]
    leave_together_at_exit()
    return place


def _end_all(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End the job on all ranks after an uncaught exception of one, or of all if they stop."""
    error = _explained(error)
    if not isinstance(error, (Interrupted, Preempted)) or _state is None:
        failure.fail(error)
    # All ranks end this way. Schedulers send their signal more than once.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if _state.place.is_first:
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


def leave_together() -> None:
    """Wait at the end of the program for all ranks, unless one still trains: then end the job."""
    global _state
    if _state is None:
        return
    try:
        for model in _state.models:
            model.check_steps()
        # One rank may have changed its weights after the last step, as to export the best ones.
        are_as_stepped = all(model.is_as_stepped for model in _state.models)
        weights = dict(_state.module.named_parameters()) if are_as_stepped else {}
        _state.check_weights("at the end of the program", weights)
    except HvdtrainError as error:
        failure.fail(error)
    _state = None


def leave_together_at_exit() -> None:
    """Have `leave_together` called before Horovod ends, which would end the other ranks' steps."""
    atexit.unregister(leave_together)
    atexit.register(leave_together)


def stop() -> None:
    """Undo `start`: end the watch over optimizers and prepared models. Collective.

    Programs need no call of it: it is for a process that continues with something else.
    """
    global _state
    if _state is not None:
        atexit.unregister(leave_together)
        for undo in reversed(_state.undo):
            undo()
        _state = None


@contextmanager
def alone() -> Iterator[None]:
    """Allow optimizers inside the block that were not given to `prepare`.

    Their models then differ between ranks, as when each rank fits a small model of its own.
    """
    state = current()
    before, state.exempt = state.exempt, True
    try:
        yield
    finally:
        state.exempt = before


def _before_step(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    state = current()
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
    model = _model_of(current(), optimizer)
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
