"""State that the calls of a user's loop share: this rank, its position, its prepared models."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from hvdtrain.errors import UsageError
from hvdtrain.health import failure
from hvdtrain.host.stop import StopRequest
from hvdtrain.options.syncoptions import Library
from hvdtrain.sync.saved import Kept
from hvdtrain.torch.agreement import Agreement
from hvdtrain.world import World


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


@dataclass(frozen=True)
class Batch:
    """This rank's share of a global batch.

    Attributes:
        samples: in the share; 0 if its only sample is a placeholder.
        total: samples of the global batch, over all ranks.
        first: the first rank with samples.
        source: name of the order of samples; empty if it is not known.
        end: position in this order after the batch; -1 if it is not known.
    """

    samples: int
    total: int
    first: int = 0
    source: str = ""
    end: int = -1

    @property
    def weight(self) -> float:
        """Factor by which a mean over the share enters the mean over the global batch."""
        return self.samples / self.total if self.total else 0.0


class Counted(Protocol):
    """A sampler, which knows the sizes of the batches that a DataLoader yields.

    Models are given by their places in `State.models`.
    """

    def size_of_next(self, samples: int, model: int) -> int:
        """Return the samples of the next batch that count, out of `samples`; note the batch."""

    def check_total(self, total: int, model: int) -> None:
        """Compare the samples of all ranks in this batch with what the sampler gave them."""

    def settle(self) -> None:
        """Set the position to the end of an epoch whose batches have all been taken."""

    def advance(self, batches: int, samples: int, model: int) -> None:
        """Note that the weights of a model have been updated with more backwards, and samples."""


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

    def before_step(self, with_closure: bool) -> None:
        """Refuse a step that would be wrong."""

    def after_step(self) -> None:
        """Count a step."""

    def check_steps(self) -> None:
        """Refuse a loop that never steps."""

    def meet(self) -> None:
        """Let ranks that train apart agree. Collective."""


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
        batch: the batch of a loader that the loop is training on, None outside of its loop.
        sampler: the training sampler that was iterated last.
        accumulating: whether backward adds to this rank's gradients without averaging them.
        exempt: whether optimizers may step outside of `prepare`.
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
    batch: Batch | None = None
    sampler: Counted | None = None
    accumulating: bool = False
    exempt: bool = False
    stop: StopRequest | None = None
    stop_code: int | None = None
    undo: list[Callable[[], object]] = field(default_factory=list)

    def position(self, source: str) -> int:
        """Return the samples consumed of an order of samples.

        Raises:
            UsageError: if a checkpoint was loaded that does not know the order.
        """
        if source in self.positions:
            self.restored = False  # another data set may be opened later, as for a second phase
        elif self.restored:
            raise UsageError(
                f"the loaded checkpoint was trained on other data than {source}: use the same "
                "data set, seed and holdout, or save to another folder"
            )
        return self.positions.setdefault(source, 0)


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


def is_started() -> bool:
    """Return whether there is a state."""
    return _state is not None


def enter(state: State | None) -> None:
    """Make `state` the current one; None if there is none any more."""
    global _state
    _state = state
