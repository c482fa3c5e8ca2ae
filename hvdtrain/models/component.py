"""A component: one named part of a model, one tensor in and one tensor out.

A model is a list of components. The initial weights of each depend only on (seed, its name), so
that any rank can build any component, in any order, and all ranks agree. In checkpoints and
gradients a parameter is called `component.parameter`, such as `layer1.0.conv1.weight`.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from hvdtrain.errors import HvdtrainError, UsageError, one_line, users_line

Result = TypeVar("Result")

IMAGE_CHANNELS = 3
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True)
class Component:
    """One named part of a model.

    Attributes:
        name: parts of letters, digits, `_` and `-`, joined by dots.
        build: returns a new module at each call; takes all its random numbers from torch's
            default generator.

    Raises:
        UsageError: for any other name, or if `build` is not a function.
    """

    name: str
    build: Callable[[], nn.Module]

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


@dataclass(frozen=True)
class Boundary:
    """Shape and dtype of what a component emits, batch dimension first.

    The memory format is not included: on the meta device convolutions do not keep it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


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


def component_seed(seed: int, name: str) -> int:
    """Return the 64-bit seed of component `name` in a run with `seed`."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


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
        module = component.build()
    return module.to(device=device, dtype=dtype)


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


def boundaries(
    components: Sequence[Component],
    image_size: int,
    batch: int = 2,
    *,
    classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "meta",
) -> list[Boundary]:
    """Return what each component emits for images [batch, 3, image_size, image_size].

    Runs a forward pass in training mode, as `run_for_shapes` does.

    Args:
        components: the model.
        image_size: width and height in pixels.
        batch: number of images.
        classes: number of classes that the last component must emit; None allows any.
        dtype: of images and weights.
        device: "cpu" computes with any weights. For small models of hvdtrain that is faster than
            what the meta device loads: PyTorch's compiler, in a second.

    Raises:
        UsageError: if a component cannot be built or run, changes its input in place, or does not
            emit one tensor with the batch first, or if the last one does not emit
            [batch, classes]. The error names the component and its input shape.
    """
    shape = (batch, IMAGE_CHANNELS, image_size, image_size)
    activation = torch.zeros(shape, dtype=dtype, device=device)
    emitted = []
    with torch.random.fork_rng(devices=[]):
        for component in components:
            if device == "meta":
                run = partial(run_for_shape, component)
                activation = run_for_shapes(component, dtype, [activation], run).to(device)
            else:
                module = shape_of(component, dtype)
                activation = run_for_shape(component, module, activation)
            emitted.append(Boundary(tuple(activation.shape), activation.dtype))
    check_logits(components[-1], emitted[-1].shape, classes)
    return emitted


def check_logits(last: Component, shape: tuple[int, ...], classes: int | None) -> None:
    """Raise UsageError unless `shape`, which the last component emits, is [batch, classes]."""
    if len(shape) != 2 or classes not in (None, shape[1]):
        expected = "classes" if classes is None else classes
        raise UsageError(
            f"the last component, {last.name!r}, emits shape {shape}, "
            f"not ({shape[0]}, {expected}): it must emit one logit for each class"
        )


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
        return _built(component, "meta")
    except UsageError:
        module = _built(component, "cpu")
    storages = (_storages(one) for one in (module, _built(component, "cpu")))
    if set.intersection(*storages):
        raise UsageError(
            f"component {component.name!r} has tensors made outside of its build function: make "
            "them inside it"
        )
    return module


def _built(component: Component, device: str) -> nn.Module:
    try:
        with isolated(0, device):
            module: object = component.build()
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


def shape_of(component: Component, dtype: torch.dtype) -> nn.Module:
    """Build a component on the CPU, with weights of any value: only shapes of outputs are right.

    Raises:
        UsageError: as `build_for_shapes` does.
    """
    module = build_for_shapes(component).to(dtype=dtype)
    weights = {  # not by Module.to_empty, which loads SymPy
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        for name, tensor in module.state_dict().items()
    }
    module.load_state_dict(weights, assign=True)
    return module


def run_for_shapes(
    component: Component,
    dtype: torch.dtype,
    inputs: Sequence[Tensor],
    run: Callable[..., Result],
) -> Result:
    """Return `run(module, *inputs)` on the meta device, or on the CPU if that fails.

    The meta device has no values and no arithmetic: `.item()`, a tensor on another device and some
    operations fail there. On the CPU, the component has weights and random inputs.

    Args:
        component: built in `dtype` as the module.
        inputs: on the meta device.

    Raises:
        UsageError: what `run` raises on the CPU.
    """
    module = build_for_shapes(component).to(dtype=dtype)
    if all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        try:
            return run(module, *inputs)
        except UsageError:
            module = _built(component, "cpu").to(dtype=dtype)
    with isolated(0, "cpu"):
        samples = [sample_input(value.shape, value.dtype, "cpu") for value in inputs]
        for sample, value in zip(samples, inputs, strict=True):
            sample.requires_grad_(value.requires_grad)
        return run(module, *(sample.clone() for sample in samples))


def sample_input(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Return a component's input: normal on the CPU, and zeros where it holds no real numbers."""
    if dtype.is_floating_point and device == "cpu":
        return torch.randn(shape, dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def run_for_shape(
    component: Component, module: nn.Module, input: Tensor, grad: bool = False
) -> Tensor:
    """Run one component, on the meta device or with any weights; check and return its output.

    Args:
        component: for errors.
        module: the component, built on the device of `input`.
        input: [batch, ...].
        grad: whether gradients are enabled.

    Raises:
        UsageError: if the component fails, changes its input in place, or does not return one
            tensor with the batch first.
    """
    shape, version = tuple(input.shape), input._version
    try:
        with torch.set_grad_enabled(grad):
            emitted: object = module(input)
    except Exception as error:
        raise UsageError(
            f"component {component.name!r} cannot take input of shape {shape}: {one_line(error)}"
            f"{users_line(error)}: correct the model, or change the image size if a shape is wrong"
        ) from error
    subject = f"component {component.name!r} with input of shape {shape}"
    if not isinstance(emitted, Tensor):
        raise UsageError(
            f"{subject} returns a {type(emitted).__name__}: a component must return one tensor"
        )
    if input._version != version:
        raise UsageError(
            f"{subject} changes its input in place: use inplace=False in its first layer"
        )
    if emitted.shape[:1] != shape[:1]:
        raise UsageError(
            f"{subject} emits shape {tuple(emitted.shape)}: the batch must stay first"
        )
    return emitted
