"""Components that are known to be slow are found to be, forward and backward."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.parallel.clock import ComponentClock
from hvdtrain.parallel.stage import StageModel

PAUSE = 0.04  # seconds


class Sleep(torch.autograd.Function):
    """Passes on what it is given, after a while forward, or backward."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, is_backward: bool) -> Tensor:
        ctx.is_backward = is_backward
        time.sleep(0 if is_backward else PAUSE)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(PAUSE if ctx.is_backward else 0)
        return gradient, None


class Slow(nn.Module):
    """A layer that takes as long as `Sleep`."""

    def __init__(self, is_backward: bool) -> None:
        super().__init__()
        self.layer, self.is_backward = nn.Linear(4, 4), is_backward

    def forward(self, given: Tensor) -> Tensor:
        """The layer, later."""
        found: Tensor = Sleep.apply(self.layer(given), self.is_backward)
        return found


def model_of(place: int, is_backward: bool = True) -> StageModel:
    names = ("first", "second", "third")
    made = {n: Slow(is_backward) if k == place else nn.Linear(4, 4) for k, n in enumerate(names)}
    return StageModel(made)


@pytest.mark.parametrize("is_backward", [False, True])
def test_each_component_has_its_own_time(is_backward: bool) -> None:
    for place, slow in enumerate(("first", "second", "third")):
        model = model_of(place, is_backward)
        model.clock = ComponentClock()
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            model.clock.end()
        taken = model.clock.read()
        assert set(taken) == {"first", "second", "third"}
        for name, seconds in taken.items():
            assert (seconds >= 2 * PAUSE) == (name == slow), (name, seconds)
        assert model.clock.read() == {}


def test_gradients_are_those_of_a_model_without_a_clock() -> None:
    model = model_of(1)
    given = torch.randn(3, 4, requires_grad=True)
    model(given).square().sum().backward()
    assert given.grad is not None
    plain = [given.grad.clone(), *(p.grad.clone() for p in model.parameters().values())]  # type: ignore[union-attr]
    for tensor in (given, *model.parameters().values()):
        tensor.grad = None
    model.clock = ComponentClock()
    model(given).square().sum().backward()
    timed = [given.grad, *(p.grad for p in model.parameters().values())]
    assert all(torch.equal(a, b) for a, b in zip(plain, timed, strict=True))  # type: ignore[arg-type]


def test_evaluation_is_not_timed() -> None:
    model = model_of(0)
    model.clock = ComponentClock()
    with torch.inference_mode():
        model(torch.ones(2, 4))
    assert model.clock.read() == {}
