"""State that the calls of a user's loop share: this rank, its position, its prepared models."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from hvdtrain.errors import UsageError
from hvdtrain.health import failure
from hvdtrain.host.process import StopRequest
from hvdtrain.options.sections import Library
from hvdtrain.sync.states import Kept
from hvdtrain.torch.agreement import Agreement
from hvdtrain.torch.reading import Batch, Reading
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


def is_started() -> bool:
    """Return whether there is a state."""
    return _state is not None


def enter(state: State | None) -> None:
    """Make `state` the current one; None if there is none any more."""
    global _state
    _state = state
