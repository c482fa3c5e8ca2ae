"""Components that sleep: how long, in which half of a backward, and with how much payload."""

import pytest
import torch
from torch import nn

from hvdtrain.emulate import (
    SCALE,
    EmulatedComponent,
    Work,
    emulated,
    scaled_sizes,
    sleep_in_updates,
)
from hvdtrain.models import components
from hvdtrain.models.component import build_component
from hvdtrain.models.costs import component_costs
from hvdtrain.parallel import halves
from hvdtrain.parallel.stage import forward_recomputed
from hvdtrain.planner.network import Curve, Line
from hvdtrain.planner.profile import ComponentTimes

TIMES = ComponentTimes(
    forward=Curve.straight(Line(0.0, 1.0)), backward=Curve.straight(Line(0.0, 2.0)), update=0.5
)


class Slept(list[float]):
    """The seconds of each sleep."""

    def component(self, sizes: list[int]) -> EmulatedComponent:
        return EmulatedComponent(sizes, 5, Work(TIMES, lambda seconds, _: self.append(seconds)))


def test_a_whole_backward_takes_its_seconds_on_any_path() -> None:
    for sizes, needs_input, parts in (([7], True, [3, 3]), ([7], False, [6]), ([], True, [6])):
        slept = Slept()
        module = slept.component(sizes)
        module(torch.ones(3, 4, requires_grad=needs_input)).sum().backward()
        assert slept == [3, *parts]


def test_each_half_of_a_split_backward_takes_its_half() -> None:
    slept = Slept()
    first, second = slept.component([7]), slept.component([2, 3])
    inputs = torch.ones(3, 4, requires_grad=True)
    output = second(first(inputs))
    slept.clear()
    parameters = [*first.parameters(), *second.parameters()]
    groups = halves.backward_input(output, torch.ones_like(output), inputs, parameters)
    assert slept == [3, 3]
    assert inputs.grad is not None
    assert all(parameter.grad is None for parameter in parameters)
    halves.backward_weight(groups)
    assert slept == [3, 3, 3, 3]
    assert all(parameter.grad is not None for parameter in parameters)


def test_a_component_is_complete_before_the_one_before_it_starts() -> None:
    order = list[str]()

    def work(name: str) -> Work:
        return Work(TIMES, lambda *_: order.append(name))

    modules = [EmulatedComponent([7], 5, work(name)) for name in ("first", "second")]
    for name, module in zip(("first", "second"), modules, strict=True):
        (parameter,) = module.parameters()
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: order.append(f"gradient of {name}")
        )
    output = modules[1](modules[0](torch.ones(3, 4)))
    order.clear()
    output.sum().backward()
    assert order == ["second", "second", "gradient of second", "first", "gradient of first"]


def test_a_recomputed_component_takes_its_forward_again() -> None:
    slept = Slept()
    inputs = torch.ones(3, 4, requires_grad=True)
    forward_recomputed(slept.component([7]), inputs).sum().backward()
    assert sorted(slept) == [3, 3, 3, 3]


def test_updates_take_the_seconds_of_emulated_components_only() -> None:
    slept = Slept()
    modules = [slept.component([7]), nn.Linear(2, 2), slept.component([7])]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = parameters[0].detach().clone()
    sleep_in_updates(optimizer, modules)
    optimizer.step()
    assert slept == [0.5, 0.5]
    assert parameters[0].allclose(before - 1)


def test_the_payload_is_the_modelled_one_divided_by_the_scale() -> None:
    real = components("resnet18", 100, 32, None, 0)
    costs = component_costs(real, 32, classes=100)
    slept = Slept()
    made = emulated(
        real, costs, lambda name: Work(TIMES, lambda seconds, _: slept.append(seconds)), itemsize=4
    )
    assert component_costs(made, 32, classes=100) == costs
    batch = torch.ones(2, 3, 32, 32)
    for component, cost in zip(made, costs, strict=True):
        module = build_component(component, seed=0)
        count = sum(parameter.numel() for parameter in module.parameters())
        assert abs(SCALE * count - cost.sizes.elements) < SCALE
        batch = module(batch)
        if cost is not costs[-1]:
            assert SCALE * batch[0].nbytes == cost.output_bytes
    assert batch.shape == (2, 100)
    module = build_component(made[0], seed=0)
    slept.clear()
    assert module(torch.empty(2, 3, 32, 32, device="meta")).is_meta
    assert slept == []


@pytest.mark.parametrize(
    ("elements", "sizes"),
    [([], []), ([3], [1]), ([15, 15], [1, 2]), ([5, 4, 1], [1]), ([100, 1, 9], [10, 1])],
)
def test_small_tensors_count_for_the_ones_after_them(
    elements: list[int], sizes: list[int]
) -> None:
    assert scaled_sizes(elements, scale=10) == sizes
