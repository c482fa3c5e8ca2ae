"""What each component costs, counted on torch's meta device: no weights, no arithmetic.

That device has no autocast: memory in bf16 is counted on torch's fake tensors, which stand for
those of another device and hold nothing either.

Arithmetic and memory of one sample are the difference between batches of four and of two, halved,
so that what does not grow with the batch (weights, statistics of batch norms) does not count.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain.errors import UsageError
from hvdtrain.models.component import (
    IMAGE_CHANNELS,
    Component,
    build_on_meta,
    check_logits,
    run_on_meta,
)

BATCHES = (2, 4)


@dataclass(frozen=True)
class ComponentCost:
    """What one component costs; all but parameters and buffers for one sample.

    Attributes:
        name: the component's name.
        parameters: number of parameters; one that the component uses twice counts once.
        parameter_bytes: memory of the parameters; as much again for their gradients.
        buffer_bytes: memory of the buffers, such as running statistics.
        forward_flops: operations of the forward pass, a multiply-add as two, and one for each
            element made or saved, so that components without matrix products cost something too.
        output_shape: shape of what is handed to the next component, without the batch.
        output_bytes: memory of the same.
        saved_bytes: activations that autograd keeps for backward, without the component's input:
            that is in the predecessor's `saved_bytes` or is its output. Activations of a chain
            are at most the sum of `saved_bytes` and `output_bytes`.
        is_differentiable: whether a gradient can come back behind it: it emits floating numbers.
        batch_norms: layers that `--batch-norm sync` lets communicate.
        fixed_bytes: what autograd keeps of any number of samples: statistics, weights in bf16.
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


def component_costs(
    components: Sequence[Component],
    image_size: int,
    *,
    classes: int | None,
    dtype: torch.dtype = torch.float32,
    autocast: str | None = None,
) -> list[ComponentCost]:
    """Return what each component costs for images [n, 3, image_size, image_size].

    `dtype` is that of images and weights; `autocast` the type of the device under whose autocast
    forwards run in bf16, if they do. Raises UsageError for the same reasons as `boundaries`.
    """
    shape = (IMAGE_CHANNELS, image_size, image_size)
    costs = _counted(components, shape, dtype, nullcontext())
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
    """The same, with memory as autocast makes it; as it is, if that cannot be found out."""
    casts = torch.autocast(device, dtype=torch.bfloat16)
    try:
        found = _counted(components, shape, torch.float32, casts, device)
    except UsageError:  # of tensors, say, that are on no device but their own: all in fp32 runs
        return costs
    return [
        replace(
            cost,
            output_bytes=each.output_bytes,
            saved_bytes=each.saved_bytes,
            fixed_bytes=each.fixed_bytes,
        )
        for cost, each in zip(costs, found, strict=True)
    ]


def _counted(
    components: Sequence[Component],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    casts: AbstractContextManager[Any],
    device: str = "meta",
) -> list[ComponentCost]:
    costs = []
    fake = nullcontext() if device == "meta" else FakeTensorMode(allow_non_fake_inputs=True)
    # Whatever the caller does, autograd takes part here.
    with torch.inference_mode(False), torch.enable_grad(), casts:
        modules = [build_on_meta(component).to(dtype=dtype) for component in components]
        with fake:
            given = [torch.empty(batch, *shape, dtype=dtype, device=device) for batch in BATCHES]
            for component, module in zip(components, modules, strict=True):
                module.to_empty(device=device)
                small, large = (_run(component, module, batch) for batch in given)
                costs.append(_cost(component, module, small, large))
                given = [small.emitted, large.emitted]
    return costs


@dataclass
class _Run:
    """One forward pass: what it emitted, its operations, and the tensors that autograd saved.

    `saved` holds one tensor of each storage, so that no storage's address is used again.
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


def _run(component: Component, module: nn.Module, given: Tensor) -> _Run:
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved.setdefault(_storage(tensor), tensor)
        return tensor

    counter = FlopCounterMode(display=False)
    with saved_tensors_hooks(keep, lambda tensor: tensor), counter, _FusedAttention():
        emitted = run_on_meta(component, module, given, grad=True)
    for known in (given, *module.parameters(), *module.buffers()):
        saved.pop(_storage(known), None)
    # Not a leaf: a component that changes its input in place gets the message made for that.
    next_input = torch.empty_like(emitted, requires_grad=emitted.is_floating_point()).clone()
    return _Run(next_input, counter.get_total_flops(), saved)


class _FusedAttention(TorchFunctionMode):
    """Plain attention as CPUs and GPUs compute it: its weights [tokens, tokens] are not saved.

    The meta device has no choice of kernels and would take the one that saves them.
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
    )
