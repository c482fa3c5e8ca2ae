"""Components whose computation is a sleep: as many bytes as the real ones, divided by a scale.

Weights, activations and gradients are real tensors, which are sent, summed, updated and saved as
those of any model. Their values mean nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hvdtrain.models.component import Component
from hvdtrain.models.costs import ComponentCost, CountedComponent

if TYPE_CHECKING:
    from hvdtrain.planner.profile import ComponentTimes

SCALE = 1024  # bytes of the modelled tensors per byte of the emulated ones
READ = 64  # values per sample from which the output is computed


@dataclass(frozen=True)
class Work:
    """The seconds of a component on this rank's device.

    Attributes:
        compute: lets modelled seconds pass; its second argument is the slowdown beside an
            all-reduce, None for that of the network.
    """

    times: "ComponentTimes"
    compute: Callable[[float, float | None], None]

    def forward(self, rows: int) -> None:
        """Let the seconds of a forward pass."""
        self.compute(self.times.forward(rows), None)

    def backward_part(self, rows: int, part: float) -> None:
        """Let a part of the seconds of a backward pass."""
        self.compute(part * self.times.backward(rows), self.times.contention)

    def update(self) -> None:
        """Let the seconds of an update pass."""
        self.compute(self.times.update, None)


class EmulatedComponent(nn.Module):
    """A module that sleeps in forward and backward.

    The backward has two halves, on the path to the input and on that to the weights, so that a
    schedule may split it. Without one of these paths the other one takes all of the time.

    Args:
        sizes: elements of the weights.
        width: elements of the output per sample.
    """

    def __init__(self, sizes: Sequence[int], width: int, work: Work) -> None:
        super().__init__()
        self.width, self.work = width, work
        for number, size in enumerate(sizes):
            self.register_parameter(f"weight{number}", nn.Parameter(0.1 * torch.randn(size)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [n, width] for [n, ...]."""
        rows, weights = len(inputs), tuple(self.parameters())
        if not inputs.is_meta:
            self.work.forward(rows)
        # tanh saves its result: recomputation starts when a backward needs a saved tensor. The
        # path to the input comes last, because autograd runs the newest operations first.
        bias = torch.tanh(torch.cat(weights).mean()) if weights else None
        output = torch.tanh(inputs.flatten(1)[:, :READ].mean(1, keepdim=True))
        paths = [path for path in (output, bias) if path is not None and path.requires_grad]
        for path in paths:
            if not inputs.is_meta:
                path.register_hook(partial(self._backward, rows, 1 / len(paths)))
        output = output if bias is None else output + bias
        return output.expand(rows, self.width).contiguous()

    def _backward(self, rows: int, part: float, _: Tensor) -> None:
        self.work.backward_part(rows, part)


def emulated(
    components: Sequence[Component],
    costs: Sequence[ComponentCost],
    work: Callable[[str], Work],
    itemsize: int,
) -> list[Component]:
    """Return components of the same names and costs that sleep.

    Args:
        work: of a component, by its name.
        itemsize: bytes of a value.
    """
    made: list[Component] = []
    for place, (component, cost) in enumerate(zip(components, costs, strict=True)):
        is_last = place == len(components) - 1
        width = cost.output_shape[-1] if is_last else cost.output_bytes // (itemsize * SCALE)
        sizes = scaled_sizes([gradient.elements for gradient in cost.sizes.gradients])
        build = partial(EmulatedComponent, sizes, max(1, width), work(component.name))
        made.append(CountedComponent(component.name, build, cost=cost))
    return made


def scaled_sizes(elements: Sequence[int], scale: int = SCALE) -> list[int]:
    """Return sizes of tensors with 1/scale of the elements in all, and at least one.

    Small tensors are left out; their elements count for the ones after them.
    """
    totals = [total // scale for total in accumulate(elements)]
    sizes = [end - start for start, end in zip([0, *totals], totals, strict=False) if end > start]
    return sizes or [1] * (sum(elements) > 0)


def sleep_in_updates(optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> None:
    """Let the updates of emulated components take their modelled seconds."""
    slow = [module for module in modules if isinstance(module, EmulatedComponent)]
    if not slow:
        return

    def sleep(*_: object) -> None:
        for module in slow:
            module.work.update()

    optimizer.register_step_pre_hook(sleep)
