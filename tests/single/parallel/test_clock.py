"""The component clock measures artificially slow components, forward and backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.parallel.clock import ComponentClock
from hvdtrain.parallel.stage import StageModel


class Clock:
    """A clock that only slow layers advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Takes(torch.autograd.Function):
    """Returns its input one second later, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, clock: Clock, is_backward: bool) -> Tensor:
        ctx.clock, ctx.is_backward = clock, is_backward
        clock.now += not is_backward
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.now += ctx.is_backward
        return gradient, None, None


class Slow(nn.Module):
    """A linear layer that takes one second, in forward or in backward."""

    def __init__(self, clock: Clock, is_backward: bool) -> None:
        super().__init__()
        self.layer, self.clock, self.is_backward = nn.Linear(4, 4), clock, is_backward

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = Takes.apply(self.layer(input), self.clock, self.is_backward)
        return output


NAMES = ("first", "second", "third")


def model_of(slow: str, clock: Clock, is_backward: bool = True) -> StageModel:
    return StageModel(
        {name: Slow(clock, is_backward) if name == slow else nn.Linear(4, 4) for name in NAMES}
    )


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("slow", NAMES)
def test_each_component_has_its_own_time(slow: str, is_backward: bool) -> None:
    clock = Clock()
    model = model_of(slow, clock, is_backward)
    model.clock = ComponentClock(clock)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        model.clock.end()
        clock.now += 10  # other stages, and the optimizer
    assert model.clock.read() == {name: 2.0 * (name == slow) for name in NAMES}
    assert model.clock.read() == {}


def test_gradients_are_those_of_a_model_without_a_clock() -> None:
    model = model_of("second", Clock())
    input = torch.randn(3, 4, requires_grad=True)
    model(input).square().sum().backward()
    assert input.grad is not None
    plain = [input.grad.clone(), *(p.grad.clone() for p in model.parameters().values())]  # type: ignore[union-attr]
    for tensor in (input, *model.parameters().values()):
        tensor.grad = None
    model.clock = ComponentClock()
    model(input).square().sum().backward()
    timed = [input.grad, *(p.grad for p in model.parameters().values())]
    assert all(torch.equal(a, b) for a, b in zip(plain, timed, strict=True))  # type: ignore[arg-type]


def test_evaluation_is_not_timed() -> None:
    model = model_of("first", Clock())
    model.clock = ComponentClock()
    with torch.inference_mode():
        model(torch.ones(2, 4))
    assert model.clock.read() == {}
