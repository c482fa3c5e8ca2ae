"""Trial runs of components: the shapes that they emit, and their operations and memory.

Costs are counted on the meta device, without weights. A component that cannot run there is counted
on the CPU. The meta device has no autocast: memory in bf16 is counted on torch's fake tensors,
which imitate another device and hold no data either.

Operations and memory per sample are half the difference between batches of four and of two, so
that anything that does not grow with the batch (weights, batch norm statistics) is not counted.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain.data.index import InputSize
from hvdtrain.errors import UsageError, one_line, users_line
from hvdtrain.models.component import (
    Component,
    build_for_shapes,
    built_on,
    cast,
    isolated,
)
from hvdtrain.models.find import input_shape
from hvdtrain.plan.traffic import Gradient, Sizes, as_matrix

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
    image_size: InputSize,
    batch: int = 2,
    *,
    classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "meta",
) -> list[Boundary]:
    """Return what each component emits for images of a size.

    Runs a forward pass in training mode, as `run_for_shapes` does.

    Args:
        components: the model.
        image_size: as of `models.components`.
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
    shape = (batch, *input_shape(image_size))
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


BATCHES = (2, 4)
IMAGE_DIMENSIONS = 4  # of tensors with a channels_last order


@dataclass(frozen=True)
class ComponentCost:
    """Operations and memory of one component, per sample except where noted.

    Attributes:
        name: of the component.
        parameters: number of parameters, for any batch; a shared one counts once.
        parameter_bytes: memory of the parameters; their gradients need the same again.
        buffer_bytes: memory of the buffers, such as running statistics.
        forward_flops: operations of the forward pass. A multiply-add counts as two, and each
            element made or saved as one, so that components without matrix products have a cost.
        output_shape: of the output, without the batch.
        output_bytes: memory of the output.
        saved_bytes: activations that autograd keeps for backward, without the component's input,
            which is the predecessor's output or in its `saved_bytes`. The activations of a chain
            are at most the sum of `saved_bytes` and `output_bytes`.
        is_differentiable: whether gradients can flow back from its output: it is floating point.
        batch_norms: the number of layers that `--batch-norm sync` synchronises.
        fixed_bytes: memory that autograd keeps for any batch size: statistics, weights in bf16.
        tensors: sizes of what replicas agree on; None: one vector of all parameters.
    """

    name: str
    parameters: int
    parameter_bytes: int
    buffer_bytes: int
    forward_flops: float
    output_shape: tuple[int, ...]
    output_bytes: int
    saved_bytes: int
    is_differentiable: bool = True
    batch_norms: int = 0
    fixed_bytes: int = 0
    tensors: Sizes | None = None

    @property
    def sizes(self) -> Sizes:
        """The sizes of what replicas agree on."""
        return self.tensors or Sizes((Gradient(self.parameter_bytes // 4),))


@dataclass(frozen=True)
class CountedComponent(Component):
    """A component that stands for another one, whose cost was counted.

    Attributes:
        cost: of the other one.
    """

    cost: ComponentCost = field(kw_only=True)


def component_costs(
    components: Sequence[Component],
    image_size: InputSize,
    *,
    classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    autocast: str | None = None,
) -> list[ComponentCost]:
    """Return the cost of each component for images of a size.

    Args:
        components: the model.
        image_size: as of `models.components`.
        classes: as in `boundaries`.
        dtype: of images and weights.
        autocast: the device type whose bf16 autocast forwards use; None for no autocast.

    Raises:
        UsageError: as `boundaries`.
    """
    counted = [part.cost for part in components if isinstance(part, CountedComponent)]
    if len(counted) == len(components):
        return counted
    shape = input_shape(image_size)
    costs = _counted(components, shape, dtype, nullcontext())
    if classes is not None:
        check_logits(components[-1], (BATCHES[0], *costs[-1].output_shape), classes)
    if autocast is not None:
        costs = _under_autocast(components, shape, costs, autocast)
    return costs


def _under_autocast(
    components: Sequence[Component],
    shape: tuple[int, ...],
    costs: list[ComponentCost],
    device: str,
) -> list[ComponentCost]:
    """Return `costs` with memory under autocast, or unchanged if that cannot be counted."""
    casts = torch.autocast(device, dtype=torch.bfloat16)
    try:
        cast_costs = _counted(components, shape, torch.float32, casts, device)
    except UsageError:  # such as for tensors on an explicit device: keep the memory of fp32
        return costs
    return [
        replace(
            cost,
            output_bytes=cast.output_bytes,
            saved_bytes=cast.saved_bytes,
            fixed_bytes=cast.fixed_bytes,
        )
        for cost, cast in zip(costs, cast_costs, strict=True)
    ]


def _counted(
    components: Sequence[Component],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    casts: AbstractContextManager[Any],
    device: str = "meta",
) -> list[ComponentCost]:
    costs = []
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # Enable gradients whatever mode the caller is in: autograd's saved tensors are counted.
    with torch.inference_mode(False), torch.enable_grad(), casts:
        with nullcontext() if device == "meta" else fake:
            inputs = [torch.empty(batch, *shape, dtype=dtype, device=device) for batch in BATCHES]
        for component in components:
            count = partial(_count, component, device)
            if device == "meta":
                cost, inputs = run_for_shapes(component, dtype, inputs, count)
            else:
                module = cast(component, build_for_shapes(component), dtype)
                with fake:
                    cost, inputs = count(module.to_empty(device=device), *inputs)
            costs.append(cost)
    return costs


def _count(
    component: Component, device: str, module: nn.Module, *inputs: Tensor
) -> tuple[ComponentCost, list[Tensor]]:
    """Return the cost of a component, and the inputs of the next one on `device`."""
    small, large = (_run(component, module, batch) for batch in inputs)
    emitted = [
        # Not a leaf: autograd would forbid changing it in place before our message about that.
        torch.empty_like(
            run.emitted, requires_grad=run.emitted.is_floating_point(), device=device
        ).clone()
        for run in (small, large)
    ]
    return _cost(component, module, small, large), emitted


@dataclass
class _Run:
    """The results of one forward pass.

    Attributes:
        emitted: the output.
        flops: operations.
        saved: the tensors that autograd saved, one per storage. Keeping them prevents reuse of
            the storages' addresses.
    """

    emitted: Tensor
    flops: int
    saved: dict[int, Tensor] = field(default_factory=dict)

    @property
    def saved_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.saved.values())

    @property
    def elements(self) -> int:
        saved = self.saved.values()
        return self.emitted.numel() + sum(
            tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in saved
        )


def _run(component: Component, module: nn.Module, input: Tensor) -> _Run:
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved.setdefault(_storage(tensor), tensor)
        return tensor

    counter = FlopCounterMode(display=False)
    with saved_tensors_hooks(keep, lambda tensor: tensor), counter, _FusedAttention():
        emitted = run_for_shape(component, module, input, grad=True)
    for known in (input, *module.parameters(), *module.buffers()):
        saved.pop(_storage(known), None)
    return _Run(emitted.detach(), counter.get_total_flops(), saved)


class _FusedAttention(TorchFunctionMode):
    """Makes the meta device use fused attention, which does not save its [tokens, tokens] weights.

    CPUs and GPUs use such kernels; the meta device would choose the one that saves the weights.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        is_plain = (
            func is functional.scaled_dot_product_attention and len(args) == 3 and not kwargs
        )
        if is_plain and args[0].is_meta:
            return torch.ops.aten._scaled_dot_product_flash_attention(*args)[0]
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata  # data pointers are all 0 on the meta device
    return address


def _cost(component: Component, module: nn.Module, small: _Run, large: _Run) -> ComponentCost:
    samples = BATCHES[1] - BATCHES[0]
    output_shape = tuple(small.emitted.shape[1:])
    operations = large.flops + large.elements - small.flops - small.elements
    return ComponentCost(
        name=component.name,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        parameter_bytes=sum(parameter.nbytes for parameter in module.parameters()),
        buffer_bytes=sum(buffer.nbytes for buffer in module.buffers()),
        forward_flops=operations / samples,
        output_shape=output_shape,
        output_bytes=prod(output_shape) * small.emitted.element_size(),
        saved_bytes=(large.saved_bytes - small.saved_bytes) // samples,
        is_differentiable=small.emitted.is_floating_point(),
        fixed_bytes=max(0, 2 * small.saved_bytes - large.saved_bytes),
        batch_norms=sum(isinstance(layer, _BatchNorm) for layer in module.modules()),
        tensors=_sizes(module),
    )


def _sizes(module: nn.Module) -> Sizes:
    """Return the sizes of a component's gradients and batch norm statistics."""
    trained = [value.detach() for value in module.parameters() if value.requires_grad]
    dense = [  # in the memory order that a stage's weights have
        value.to(memory_format=torch.channels_last) if value.dim() == IMAGE_DIMENSIONS else value
        for value in trained
    ]
    statistics = [
        buffer
        for layer in module.modules()
        if isinstance(layer, _NormBase)
        for buffer in layer.buffers(recurse=False)
    ]
    averages = [buffer for buffer in statistics if buffer.is_floating_point()]
    reference = [*trained, *statistics][:1]
    return Sizes(
        gradients=tuple(
            Gradient(*as_matrix(value.shape, value.stride()), value.dim() > 1) for value in dense
        ),
        averages=sum(buffer.numel() for buffer in averages),
        counters=sum(buffer.numel() for buffer in statistics) - sum(map(torch.numel, averages)),
        itemsize=reference[0].element_size() if reference else 4,
    )
