"""Components of modules that exist already: copies of a module, or of the parts of one."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from hvdtrain.errors import UsageError, one_line
from hvdtrain.models.component import Component

WHOLE = "model"  # the component of a module that is not cut


@dataclass(frozen=True)
class CopyOf:
    """A component's build function that copies a module with its weights.

    Attributes:
        module: the module, which is not changed.
        before, after: what runs before and after it, without parameters; None for nothing.
    """

    module: nn.Module
    before: nn.Module | None = None
    after: nn.Module | None = None

    def __call__(self) -> nn.Module:
        """Return a copy on torch's default device; on the meta device without values."""
        module = _copied(self.module)
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]  # its input is another component's
        if self.before is not None:
            module.register_forward_pre_hook(partial(_run_before, self.before))
        if self.after is not None:
            module.register_forward_hook(partial(_run_after, self.after))
        return module


def _run_before(steps: nn.Module, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    prepared: Tensor = steps(*inputs)
    return prepared


def _run_after(
    steps: nn.Module, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    finished: Tensor = steps(output)
    return finished


def _copied(module: nn.Module) -> nn.Module:
    """Return a deep copy with all parameters and buffers on torch's default device.

    Raises:
        UsageError: if the module cannot be copied.
    """
    device = torch.get_default_device()
    tensors: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if isinstance(tensor, UninitializedParameter):
            raise UsageError(
                f"{type(module).__name__} has lazy modules without weights: run it once first"
            )
        values = tensor.detach().to(device, copy=True)
        is_parameter = isinstance(tensor, nn.Parameter)
        tensors[id(tensor)] = (
            nn.Parameter(values, tensor.requires_grad) if is_parameter else values
        )
    try:
        return copy.deepcopy(module, tensors)
    except Exception as error:
        raise UsageError(
            f"{type(module).__name__} cannot be copied ({one_line(error)}): pass a function of "
            "(classes, image_size) that builds it"
        ) from error


def whole(module: nn.Module) -> list[Component]:
    """Return a module as a model of one component, for the plans `single` and `dp`."""
    return [Component(WHOLE, CopyOf(module))]


def ready_modules(components: Sequence[Component]) -> dict[str, nn.Module]:
    """Return the modules that components copy, by component."""
    return {part.name: part.build.module for part in components if isinstance(part.build, CopyOf)}


def built_whole(function: Callable[[], object]) -> list[Component]:
    """Return a function that builds a whole module as a model of one component."""

    def build() -> nn.Module:
        module = function()
        assert isinstance(module, nn.Module)
        return module

    return [Component(WHOLE, build)]
