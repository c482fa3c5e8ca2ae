"""Components that are known to be slow are found to be, forward and backward."""

import time
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.parallel.clock import ComponentClock
from hvdtrain.parallel.stage import StageModel

FORWARD, BACKWARD = 0.03, 0.05


class Sleep(torch.autograd.Function):
    """Passes on what it is given, after a while."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD)
        return gradient


class Slow(nn.Module):
    """A layer that takes as long as `Sleep`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, given: Tensor) -> Tensor:
        """The layer, later."""
        found: Tensor = Sleep.apply(self.layer(given))
        return found


def model_of(place: int) -> StageModel:
    names = ("first", "second", "third")
    made = {n: Slow() if k == place else nn.Linear(4, 4) for k, n in enumerate(names)}
    return StageModel(made)


def test_each_component_has_its_own_time() -> None:
    for place, slow in enumerate(("first", "second", "third")):
        model = model_of(place)
        model.clock = ComponentClock()
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            model.clock.end()
        taken = model.clock.read()
        assert set(taken) == {"first", "second", "third"}
        for name, (forward, backward) in taken.items():
            is_slow = name == slow
            assert (forward >= 2 * FORWARD) == is_slow, (name, forward)
            assert (backward >= 2 * BACKWARD) == is_slow, (name, backward)
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
