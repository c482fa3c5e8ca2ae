"""Trial runs of components: the shapes that they emit, without a step of training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from hvdtrain.errors import UsageError, one_line, users_line
from hvdtrain.models.component import (
    IMAGE_CHANNELS,
    Component,
    build_for_shapes,
    built_on,
    cast,
    isolated,
)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Boundary:
    """Shape and dtype of what a component emits, batch dimension first.

    The memory format is not included: on the meta device convolutions do not keep it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


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
    if classes is not None:
        check_logits(components[-1], emitted[-1].shape, classes)
    return emitted


def check_logits(last: Component, shape: tuple[int, ...], classes: int) -> None:
    """Raise UsageError unless `shape`, which the last component emits, is [batch, classes]."""
    if len(shape) != 2 or shape[1] != classes:
        raise UsageError(
            f"the last component, {last.name!r}, emits shape {shape}, "
            f"not ({shape[0]}, {classes}): it must emit one logit for each class"
        )


def shape_of(component: Component, dtype: torch.dtype) -> nn.Module:
    """Build a component on the CPU, with weights of any value: only shapes of outputs are right.

    Raises:
        UsageError: as `build_for_shapes` does.
    """
    module = cast(component, build_for_shapes(component), dtype)
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
    module = cast(component, build_for_shapes(component), dtype)
    if all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        try:
            return run(module, *inputs)
        except UsageError:
            module = cast(component, built_on(component, "cpu"), dtype)
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
