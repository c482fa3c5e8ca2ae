"""The batch that a backward belongs to, and its samples, as a reading or a forward counts them."""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hvdtrain.data import order
from hvdtrain.data.order import Range
from hvdtrain.errors import UsageError


@dataclass(frozen=True)
class Batch:
    """This rank's share of a global batch.

    Attributes:
        samples: in the share; 0 if its only sample is a placeholder.
        total: samples of the global batch, over all ranks; -1 before the ranks have exchanged it.
        first: the first rank with samples.
        source: name of the order of samples; empty if it is not known.
        end: position in this order after the batch; -1 if it is not known.
        factor: weight that the user has given; None: the share of the samples.
    """

    samples: int
    total: int
    first: int = 0
    source: str = ""
    end: int = -1
    factor: float | None = None

    @property
    def weight(self) -> float:
        """Factor by which a mean over the share enters the mean over the global batch."""
        if self.factor is not None:
            return self.factor
        return self.samples / self.total if self.total else 0.0


class Reading:
    """One iteration over training batches; the batch taken last is that of the next backward.

    Args:
        batches: of the iteration, in order.

    Attributes:
        read: batches read so far.
        seen: batches that the loop had when its DataLoader last read one; None: no DataLoader.
        used: batches up to the last one that had a backward.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches
        self.read = self.used = 0
        self.seen: int | None = None
        self._iterator: Callable[[], object] = lambda: self
        self._reader: Callable[[], Any] = lambda: None

    def by(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return `batches`; the reading ends with it, or with the DataLoader that called."""
        # Workers of a DataLoader read ahead of the loop; only its iterator knows what that has.
        reader = _reader(sys._getframe(1))
        self._reader = weakref.ref(reader) if reader is not None else self._reader
        self._iterator = self._reader if reader is not None else weakref.ref(batches)
        return batches

    @property
    def is_live(self) -> bool:
        """Return whether the loop over the batches still runs."""
        return self._iterator() is not None

    @property
    def number(self) -> int:
        """Return the number of the batch that the loop is on, from 1."""
        reader = self._reader()
        if reader is not None:
            return int(reader._num_yielded)
        # A DataLoader that is gone has given one batch more than when it last read one.
        return self.read if self.seen is None else min(self.seen + 1, self.read)

    def note_reader(self) -> None:
        """Note what the DataLoader has given the loop before it reads the next batch."""
        if (reader := self._reader()) is not None:
            self.seen = int(reader._num_yielded)

    def use(self) -> Batch | None:
        """Return the batch of a backward that runs now; None outside of the loop.

        Raises:
            UsageError: if the loop does not train on the batch that it has read last.
        """
        number = self.number
        if self.used and not self.is_live:
            return None
        if not self.used and number > 1:
            raise UsageError(
                f"{number} batches were read before the first backward, so that its samples are "
                "not known: run a backward in each turn of a loop over the DataLoader or loader "
                "itself, whose workers read ahead, and not over a list or prefetcher of it"
            )
        if not number or not self.is_live:
            return None
        self.used = number
        return self.batches[number - 1]

    @property
    def position(self) -> dict[str, int]:
        """Return the position after the batches that were used, by name of the order."""
        last = self.batches[self.used - 1]
        return {last.source: last.end} if self.used and last.source else {}


class Counted(Iterator[list[int]]):
    """Batches of a reading, which counts them."""

    def __init__(self, reading: Reading, batches: Iterator[list[int]]) -> None:
        self.reading, self.batches = reading, batches

    def __next__(self) -> list[int]:
        self.reading.note_reader()
        batch = next(self.batches)
        self.reading.read += 1
        return batch


def _reader(frame: FrameType | None) -> _BaseDataLoaderIter | None:
    """Return the iterator of a DataLoader that calls from a frame or an outer one."""
    while frame is not None:
        # `f_locals` keeps what it shows alive: no look into frames of the user.
        if frame.f_code.co_name in ("__init__", "_reset", "_next_index"):
            caller = frame.f_locals.get("self")
            if isinstance(caller, _BaseDataLoaderIter):
                return caller
        frame = frame.f_back
    return None


def shared(
    slices: Sequence[Range], before: int, source: str, rank: int, size: int
) -> tuple[list[Batch], list[Range]]:
    """Return a rank's share of each global batch, and the rows of the epoch that it reads.

    A rank without a sample reads one that does not count, since few layers take an empty batch.

    Args:
        before: position at the start of the epoch.
    """
    batches, rows = [], []
    for start, stop in slices:
        parts = order.split(stop - start, [1] * size)
        first = next(number for number, (low, high) in enumerate(parts) if high > low)
        low, high = parts[rank]
        batches.append(Batch(high - low, stop - start, first, source, before + stop))
        low = min(low, stop - start - 1)
        rows.append((start + low, start + max(high, low + 1)))
    return batches, rows


class ForwardWatch:
    """A hook on forward: it counts samples, and marks the outer backward. Copies do nothing."""

    def __init__(self, replica: "weakref.ref[Any] | None" = None) -> None:
        self.replica = replica

    @torch._disable_dynamo  # it would trace the reference to the replica
    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note the number of samples of a forward with gradients."""
        replica = self.replica() if self.replica is not None else None
        if replica is None or not torch.is_grad_enabled():
            return
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        samples = next((len(value) for value in inputs if value.dim()), 1)
        replica.samples = samples
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                # A reentrant checkpoint inside of the model runs a backward of its own, whose end
                # is not that of the step's.
                value.register_hook(_queueing(self.replica, samples))

    def __reduce__(self) -> tuple[Any, ...]:
        """Make copies and pickles of the model without the hook's replica."""
        return ForwardWatch, ()


def watched(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose forward takes the samples: containers have no forward."""
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        return [module for child in model.children() for module in watched(child)]
    return [model]


def _queueing(replica: "weakref.ref[Any] | None", samples: int) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        target = replica() if replica is not None else None
        if target is not None:
            target.queue()
            if target.samples is None:  # a step came after the forward
                target.samples = samples

    return hook


def parameter_hooks(
    replica: "weakref.ref[Any]", place: int
) -> tuple[Callable[[Tensor], None], Callable[[Tensor], None]]:
    """Return the hooks before and after autograd adds to the gradient of a parameter."""

    # Python's garbage collector does not see the hooks of a parameter.
    def before(_: Tensor) -> None:
        target = replica()
        if target is not None:
            target.begin()

    def after(_: Tensor) -> None:
        target = replica()
        if target is not None:
            target.arrived(place)

    return before, after
