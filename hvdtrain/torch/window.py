"""The micro-batches of a step, and the weight that this rank has in each."""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hvdtrain.errors import UsageError
from hvdtrain.plan.cut import Share
from hvdtrain.torch.reading import Batch
from hvdtrain.torch.start import State


@dataclass
class Window:
    """The micro-batches whose gradients are added up for one step.

    Attributes:
        number: of the model.
        touched: places of the parameters that have a gradient.
        weighed: whether the ranks exchange the weights that the user has given.
        counting: whether a note of the last micro-batch is under way.
    """

    number: int
    state: State
    batches: list[Batch] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)
    weighed: bool = False
    counting: bool = False

    def clear(self) -> None:
        """Forget all of it."""
        self.batches.clear()
        self.touched.clear()

    def share(self, rank: int) -> Share:
        """Return the weight of this rank's running statistics."""
        samples = sum(batch.samples for batch in self.batches)
        total = sum(batch.total for batch in self.batches)
        first = self.batches[-1].first == rank
        return Share(samples / total if total else 0.0, first, samples)

    def post(self, samples: int | None, backward: int, is_exact: bool) -> None:
        """Add the micro-batch of a backward; send what all ranks must know of it.

        Args:
            samples: of the last forward, if there was one: they count without a loader.
            is_exact: whether weights that the user has given count.

        Raises:
            UsageError: if nothing knows the samples.
        """
        state = self.state
        batch = state.use_batch()
        if batch is None and samples is None:
            raise UsageError(
                "the number of samples of this backward is not known, since the model was not "
                "called after its last step: call the prepared model, not its layers or its "
                "forward, or use distributed.loader or distributed.sampler"
            )
        batch = batch or Batch(samples or 0, -1)
        part, whole = state.loss_weight if state.loss_weight and is_exact else (None, None)
        if part is not None and not batch.samples:
            part = 0.0  # labels of a placeholder have a weight, too
        if state.place.size == 1:
            batch, whole = replace(batch, total=batch.samples), whole or part
        self.weighed = part is not None and whole is None
        if part is not None and whole is not None:
            batch = replace(batch, factor=part / whole if whole else 0.0)
        self.batches.append(batch)
        if batch.total < 0 or self.weighed:
            self.counting = True
            action = f"counting the samples of backward {backward} of model {self.number}"
            bits = int(np.float64(part or 0.0).view(np.int64))
            state.agreement.post(action, samples=batch.samples, weight=bits)
            state.agreement.settle = self.weight_of_last

    @property
    def weighs_later(self) -> bool:
        """Return whether one factor holds for gradients and statistics, once it is known."""
        return self.counting and len(self.batches) == 1 and self.state.loss_weight is None

    def weight_of_last(self) -> float:
        """Return the weight of this rank in the last micro-batch, once all ranks know it."""
        state, batch = self.state, self.batches[-1]
        if self.counting:
            self.counting, state.agreement.settle = False, None
            notes = state.agreement.read()
            if batch.total < 0:
                counts = [note.samples for note in notes]
                first = next((rank for rank, count in enumerate(counts) if count), 0)
                batch = replace(batch, total=sum(counts), first=first)
            if self.weighed:
                parts = [float(np.int64(note.weight).view(np.float64)) for note in notes]
                whole = math.fsum(parts)
                batch = replace(batch, factor=parts[state.place.rank] / whole if whole else 0.0)
            self.batches[-1] = batch
        return batch.weight


class Hooked(Protocol):
    """The receiver of the hooks: `Replica`.

    Attributes:
        samples: of the last forward with gradients; None if there was none since the last step.
    """

    samples: int | None

    def queue(self) -> None:
        """Note that a backward runs."""

    def begin(self) -> None:
        """Note that a gradient will be added."""

    def arrived(self, place: int) -> None:
        """Note that a gradient was added."""


class ForwardWatch:
    """A hook on forward: it counts samples, and marks the outer backward. Copies do nothing."""

    def __init__(self, replica: "weakref.ref[Hooked] | None" = None) -> None:
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


def _queueing(replica: "weakref.ref[Hooked] | None", samples: int) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        target = replica() if replica is not None else None
        if target is not None:
            target.queue()
            if target.samples is None:  # a step came after the forward
                target.samples = samples

    return hook


def parameter_hooks(
    replica: "weakref.ref[Hooked]", place: int
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
