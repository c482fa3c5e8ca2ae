"""A component: one named part of a model, one tensor in and one tensor out.

A model is a list of components. The initial weights of each depend only on (seed, its name), so
that any rank can build any component, in any order, and all ranks agree. In checkpoints and
gradients a parameter is called `component.parameter`, such as `layer1.0.conv1.weight`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from hvdtrain.errors import HvdtrainError, UsageError, one_line, users_line
from hvdtrain.models.find import call_users
from hvdtrain.models.shapes import component_seed

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True)
class Component:
    """One named part of a model.

    Attributes:
        name: parts of letters, digits, `_` and `-`, joined by dots.
        build: returns a new module at each call; takes all its random numbers from torch's
            default generator.
        start: of normalised training images, [n, 3, size, size] fp32 on the CPU, returns what
            some of the module's parameters and buffers start with, by name. Rank 0 calls it;
            a checkpoint or --weights replaces its values.
        frozen: patterns of the full names of parameters that are not trained.

    Raises:
        UsageError: for any other name, or if `build` is not a function.
    """

    name: str
    build: Callable[[], nn.Module]
    start: Callable[[Tensor], Mapping[str, Tensor]] | None = None
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UsageError(
                f"component name {self.name!r} is not valid: "
                "use letters, digits, '_' and '-', in parts joined by '.'"
            )
        if isinstance(self.build, nn.Module) or not callable(self.build):
            raise UsageError(
                f"component {self.name!r} holds a {type(self.build).__name__} where a function "
                "that builds its module belongs: write lambda: ... or functools.partial(...)"
            )

    def made(self) -> nn.Module:
        """Return what `build` returns, with its frozen parameters."""
        module = self.build()
        for name, parameter in module.named_parameters() if self.frozen else ():
            if any(fnmatchcase(f"{self.name}.{name}", pattern) for pattern in self.frozen):
                parameter.requires_grad_(False)
        return module


def freeze(components: Sequence[Component], patterns: str) -> list[Component]:
    """Return components whose parameters of these names are not trained.

    Args:
        patterns: full names, with * for any part of a name, joined by commas.

    Raises:
        UsageError: if one names no parameter.
    """
    wanted = tuple(patterns.split(","))
    names = [
        f"{part.name}.{name}"
        for part in components
        for name, _ in build_for_shapes(part).named_parameters()
    ]
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"--freeze {pattern} names no parameter: they are {names[0]}, ..., {names[-1]}; * "
                "stands for any part of a name"
            )
    return [replace(part, frozen=wanted) for part in components]


def check_names(components: Sequence[Component]) -> None:
    """Raise UsageError unless every `component.parameter` name is unambiguous.

    Names must differ, and no name may be another one plus a dot and more: with components `a` and
    `a.b`, `a.b.weight` could be a parameter of either.
    """
    names = [component.name for component in components]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two components are called {name!r}: give them different names")
        for other in names:
            if name.startswith(f"{other}."):
                raise UsageError(
                    f"components {other!r} and {name!r} would share parameter names: "
                    f"rename one, such as {other!r} to '{other}.first'"
                )


def check_image_size(model: str, image_size: int, smallest: int) -> None:
    """Raise UsageError for images that a model cannot take, in pixels."""
    if image_size < smallest:
        raise UsageError(
            f"{model} cannot take images of {image_size} x {image_size}: "
            f"use an image size of at least {smallest}"
        )


def as_components(model: str, returned: object) -> list[Component]:
    """Return the components that a model's function returned.

    Args:
        model: its name, for errors.
        returned: a list of Components or (name, build) pairs.

    Raises:
        UsageError: if it is anything else, or the names are not valid.
    """
    expected = "it must return a list of Component(name, build), or a torch.nn.Module"
    if not isinstance(returned, list | tuple):
        raise UsageError(f"model {model!r} returned a {type(returned).__name__}: {expected}")
    if not returned:
        raise UsageError(f"model {model!r} returned no component: {expected}")
    components = []
    try:
        for item in returned:
            if isinstance(item, tuple) and len(item) == 2:
                components.append(Component(*item))
            elif isinstance(item, Component):
                components.append(item)
            else:
                raise UsageError(f"its list holds a {type(item).__name__}: {expected}")
        check_names(components)
    except UsageError as error:
        raise UsageError(f"model {model!r}: {error}") from error
    return components


def build_component(
    component: Component,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Build `component` with the weights that (`seed`, its name) determine.

    The values are drawn on the CPU in fp32, then moved to `device` and cast to `dtype`, so that
    they are the same everywhere. The caller's random state, default device and default dtype have
    no effect and do not change.
    """
    with isolated(component_seed(seed, component.name), "cpu"):
        module = component.made()
    return cast(component, module.to(device), dtype)


def start_of(component: Component, images: Tensor) -> dict[str, Tensor]:
    """Return what parameters and buffers of a component start with, from training images.

    Raises:
        UsageError: if its function fails, or returns other names or shapes than its module has.
    """
    assert component.start is not None
    where = f"the start of component {component.name!r}"
    values = call_users(where, component.start, images)
    if not isinstance(values, Mapping):
        raise UsageError(
            f"{where} returned a {type(values).__name__}: return a dictionary of tensors by name"
        )
    tensors = build_for_shapes(component).state_dict()
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    returned = {name: tuple(np.shape(value)) for name, value in values.items()}
    if wrong := [name for name in returned if returned[name] != shapes.get(name)]:
        raise UsageError(
            f"{where} returned {wrong[0]!r} of shape {list(returned[wrong[0]])}, which its module "
            f"does not have: return tensors by name, of the shapes of its state_dict()"
        )
    return {name: torch.as_tensor(value) for name, value in values.items()}


def build_started(component: Component, values: Mapping[str, Tensor]) -> nn.Module:
    """Build a component whose parameters and buffers start with these values, by name."""
    module = component.made()
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if name in values:
                tensor.copy_(values[name])
    return module


@torch.no_grad()
def cast(component: Component, module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the floating tensors of a component's module to `dtype`: torch.float32 or float64.

    Complex buffers become complex numbers of that precision. Each parameter then fills its memory
    without gaps: flat buckets and PyTorch's fused optimizers walk through it element by element.

    Raises:
        UsageError: for a complex parameter.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise UsageError(
                f"parameter {name} of component {component.name!r} is complex: make "
                "torch.view_as_real of it the parameter, and call torch.view_as_complex in forward"
            )
        if not is_dense(parameter):
            parameter.data = parameter.data.contiguous()
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_complex():
                setattr(part, name, buffer.to(dtype.to_complex()))
    # Module.to(dtype) would drop imaginary parts.
    return module.double() if dtype == torch.float64 else module.float()


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory, in any order, without gaps."""
    expected = 1
    if not tensor.numel():
        return True
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def parameter_count(components: Sequence[Component]) -> int:
    """Return the number of parameters of all components, without making their weights."""
    return sum(
        parameter.numel()
        for component in components
        for parameter in build_for_shapes(component).parameters()
    )


def tensor_shapes(components: Sequence[Component]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter and buffer by its full name, `component.parameter`.

    The order is that of the components, with parameters before buffers in each. A tensor that a
    component uses twice is listed once. No weights are made.
    """
    shapes = {}
    for component in components:
        module = build_for_shapes(component)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            shapes[f"{component.name}.{name}"] = tuple(tensor.shape)
    return shapes


@contextmanager
def isolated(seed: int, device: str) -> Iterator[None]:
    """Make code inside draw random numbers from `seed` and create fp32 tensors on `device`."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device(device):
        # torch.manual_seed would also reseed the GPUs, whose state is not restored below.
        torch.default_generator.manual_seed(seed)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def build_for_shapes(component: Component) -> nn.Module:
    """Build a component on the meta device, without weights, or on the CPU if that fails.

    Raises:
        UsageError: if it cannot be built on the CPU either, is not a module, or has tensors that
            would not come from the seed.
    """
    try:
        return built_on(component, "meta")
    except UsageError:
        module = built_on(component, "cpu")
    storages = (_storages(one) for one in (module, built_on(component, "cpu")))
    if set.intersection(*storages):
        raise UsageError(
            f"component {component.name!r} has tensors made outside of its build function: make "
            "them inside it"
        )
    return module


def built_on(component: Component, device: str) -> nn.Module:
    """Build a component on a device from any seed.

    Raises:
        UsageError: if it cannot be built, or is not a module that a run can train.
    """
    try:
        with isolated(0, device):
            module: object = component.made()
    except HvdtrainError:
        raise
    except Exception as error:
        raise UsageError(
            f"component {component.name!r} cannot be built: {one_line(error)}"
            f"{users_line(error)}: fix its build function"
        ) from error
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"component {component.name!r} builds a {type(module).__name__}: "
            "its build function must return a torch.nn.Module"
        )
    tensors = [*module.parameters(), *module.buffers()]
    if any(isinstance(tensor, UninitializedParameter) for tensor in tensors):
        raise UsageError(
            f"component {component.name!r} has lazy modules, whose weights do not come from the "
            "seed: use modules with fixed sizes"
        )
    for tensor in tensors:
        if tensor.device.type != device:
            raise UsageError(
                f"component {component.name!r} has tensors on {tensor.device}: name no device in "
                "its build function"
            )
    return module


def _storages(module: nn.Module) -> set[int]:
    tensors = (*module.parameters(), *module.buffers())
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def kaiming_normal(weight: Tensor, mode: Literal["fan_in", "fan_out"] = "fan_in") -> None:
    """Initialise a weight before a ReLU (He et al., arXiv 1502.01852, equation 10).

    Nothing happens on the meta device, where PyTorch would load its compiler to make no value.
    """
    if not weight.is_meta:
        nn.init.kaiming_normal_(weight, mode=mode, nonlinearity="relu")
