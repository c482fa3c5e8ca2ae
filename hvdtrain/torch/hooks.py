"""Hooks on a model and its parameters, which hold no reference to what they call."""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


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
