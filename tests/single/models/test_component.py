import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from hvdtrain.errors import UsageError
from hvdtrain.models import MODEL_NAMES, components
from hvdtrain.models.component import (
    Component,
    build_component,
    check_names,
    is_dense,
    parameter_count,
    tensor_shapes,
)
from hvdtrain.models.costs import Boundary, boundaries, component_costs
from tests import warm

ROOT = Path(__file__).parents[3]
CNN = components("cnn", 10, 8)


def weights(component: Component, seed: int = 0, **options: Any) -> Tensor:
    module = build_component(component, seed, **options)
    return torch.cat([value.detach().flatten() for value in module.state_dict().values()])


@settings(max_examples=15, deadline=None)
@given(st.permutations(CNN), st.integers(1, 4), st.integers(0, 2**40))
def test_weights_are_the_same_in_any_order_and_company(
    order: list[Component], count: int, seed: int
) -> None:
    alone = {component.name: weights(component, seed) for component in reversed(CNN)}
    for component in order[:count]:
        assert torch.equal(weights(component, seed), alone[component.name])


def test_weights_are_the_same_in_another_process() -> None:
    program = (
        "from hvdtrain.models import components\n"
        "from hvdtrain.models.component import build_component\n"
        "head = build_component(components('cnn', 10, 8)[-1], 5)\n"
        "print(head.weight.double().sum().item().hex())"
    )
    run = subprocess.run(
        [warm.python(), "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    expected = build_component(CNN[-1], 5).get_parameter("weight").double().sum().item()
    assert float.fromhex(run.stdout) == expected


def test_seeds_and_names_give_different_weights() -> None:
    build = partial(nn.Linear, 3, 3)
    drawn = [weights(Component(name, build), seed) for name in ("a", "b") for seed in (-1, 0, 1)]
    for index, one in enumerate(drawn):
        assert not any(torch.equal(one, other) for other in drawn[:index])


@pytest.mark.parametrize("model", ["cnn", "resnet18", "vit_tiny"])
def test_fp64_weights_are_the_fp32_ones_cast_up(model: str) -> None:
    for component in components(model, 10, 32):
        double = weights(component, dtype=torch.float64)
        assert double.dtype == torch.float64
        assert torch.equal(double, weights(component).double())


def test_the_callers_random_state_and_defaults_neither_matter_nor_change() -> None:
    expected = weights(CNN[0])
    torch.manual_seed(3)
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            actual = weights(CNN[0])
        boundaries(CNN, 8)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(actual, expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("model", MODEL_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_boundaries_are_what_the_components_emit(model: str, dtype: torch.dtype) -> None:
    parts = components(model, 7, 32)
    activation = torch.ones(3, 3, 32, 32, dtype=dtype)
    emitted = []
    for component in parts:
        activation = build_component(component, 0, dtype=dtype)(activation)
        emitted.append(Boundary(tuple(activation.shape), activation.dtype))
    for device in ("meta", "cpu"):
        assert boundaries(parts, 32, 3, classes=7, dtype=dtype, device=device) == emitted


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu_(x).flatten(1)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class MixesBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


SHARED = nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: 1 / 0, "'part' cannot be built: ZeroDivisionError: division by zero (tests/"),
        (lambda: 3, "'part' builds a int: its build function must return a torch.nn.Module"),
        (lambda: nn.LazyLinear(10), "'part' has lazy modules"),
        (lambda: SHARED, "'part' has tensors made outside of its build function"),
        (InPlace, "(2, 3, 16, 16) changes its input in place: use inplace=False"),
        (Pair, "'part' with input of shape (2, 3, 16, 16) returns a tuple"),
        (MixesBatch, "emits shape (6, 16, 16): the batch must stay first"),
        (
            partial(nn.Conv2d, 4, 8, 3),
            "'part' cannot take input of shape (2, 3, 16, 16): RuntimeError: ",
        ),
        (nn.Flatten, "'part', emits shape (2, 768), not (2, 10): it must emit one logit"),
        (nn.Identity, "'part', emits shape (2, 3, 16, 16), not (2, 10)"),
    ],
)
def test_a_component_that_cannot_work_is_named(
    build: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        boundaries([Component("part", build)], 16, classes=10)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def the_line_that_fails() -> nn.Module:
    return Computing(lambda x: x @ torch.ones(7, 2))


class Computing(nn.Module):
    """Computes a function of its input and of its weight."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute, self.layer = compute, nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(self.compute(x.mean((1, 2))))
        return output


def decreasing() -> nn.Module:
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
    return nn.Sequential(*map(nn.Dropout, rates), Computing(torch.tanh))


def from_numpy() -> nn.Module:
    module = Computing(torch.tanh)
    module.register_buffer("constant", torch.from_numpy(np.ones(3)))
    return module


NEEDS_VALUES: dict[str, Callable[[], nn.Module]] = {
    "item in the build function": decreasing,
    "numpy in the build function": from_numpy,
    "item in forward": lambda: Computing(lambda x: x * x.abs().max().item()),
    "another device in forward": lambda: Computing(lambda x: x * torch.rand(len(x), 1)),
    "orthogonal": lambda: nn.Sequential(Computing(torch.tanh), orthogonal(nn.Linear(5, 5))),
    "cumulative": lambda: nn.Sequential(Computing(torch.tanh), nn.BatchNorm1d(5, momentum=None)),
}


@pytest.mark.parametrize("kind", NEEDS_VALUES)
def test_what_the_meta_device_cannot_do_is_done_on_the_cpu(kind: str) -> None:
    parts = [Component("part", NEEDS_VALUES[kind]), Component("head", partial(nn.Linear, 5, 3))]
    state = torch.get_rng_state()
    assert [part.shape for part in boundaries(parts, 4, classes=3)] == [(2, 5), (2, 3)]
    assert torch.equal(torch.get_rng_state(), state)
    module = build_component(parts[0], 0)
    assert parameter_count(parts[:1]) == sum(value.numel() for value in module.parameters())
    assert tensor_shapes(parts).keys() >= {f"part.{name}" for name in module.state_dict()}
    for autocast in (None, "cpu"):
        costs = component_costs(parts, 4, classes=3, autocast=autocast)
        assert costs[0].forward_flops >= 2 * 4 * 5


def test_what_is_made_outside_is_refused_on_the_cpu_too() -> None:
    def build() -> nn.Module:
        torch.ones(1).item()
        return nn.Sequential(nn.Linear(3, 3), SHARED)

    with pytest.raises(UsageError, match="'part' has tensors made outside of its build function"):
        boundaries([Component("part", build)], 2)


def test_the_line_of_the_users_file_is_named() -> None:
    line = the_line_that_fails.__code__.co_firstlineno + 1
    expected = f"(tests/single/models/test_component.py, line {line}): correct the model"
    with pytest.raises(UsageError, match=re.escape(expected)):
        boundaries([Component("part", the_line_that_fails)], 4)


def test_without_a_class_count_any_shape_will_do() -> None:
    assert boundaries([Component("flat", nn.Flatten)], 2)[0].shape == (2, 12)
    assert boundaries([Component("same", nn.Identity)], 2)[0].shape == (2, 3, 2, 2)
    with pytest.raises(UsageError, match=r"not \(2, 3\)"):
        boundaries([Component("same", nn.Identity)], 2, classes=3)


def test_a_model_for_another_image_size_is_refused_where_it_fails() -> None:
    with pytest.raises(UsageError, match=r"'dense' cannot take input of shape \(2, 64, 4, 4\)"):
        boundaries(components("cnn", 10, 32), 16)


def test_parameter_count_counts_a_shared_parameter_once() -> None:
    def tied() -> nn.Module:
        layer = nn.Linear(4, 4)
        return nn.Sequential(layer, layer)

    assert parameter_count([Component("a", tied), Component("b", partial(nn.Linear, 2, 3))]) == 29


@pytest.mark.parametrize("name", ["", "a b", ".a", "a.", "a..b", "a/b", "é", "a:b", "a\n", 3])
def test_names_that_are_not_plain_are_refused(name: Any) -> None:
    with pytest.raises(UsageError, match=r"component name .* is not valid"):
        Component(name, nn.Identity)


@pytest.mark.parametrize("build", [nn.Identity(), 3, None])
def test_a_component_needs_a_function_that_builds(build: Any) -> None:
    with pytest.raises(UsageError, match=r"'a' holds a .* where a function that builds"):
        Component("a", build)


def test_names_that_differ_or_only_look_alike_are_accepted() -> None:
    check_names([Component(name, nn.Identity) for name in ("layer1", "layer10.0", "layer1-0")])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.from_regex(r"[ab](\.[ab]){0,2}", fullmatch=True), min_size=1, max_size=4))
def test_accepted_names_leave_each_parameter_one_component(names: list[str]) -> None:
    parameters = ["a", "b", "a.a", "a.b", "b.a", "b.b", "a.a.a"]
    keys = [f"{name}.{parameter}" for name in names for parameter in parameters]
    owners = [sum(key.startswith(f"{name}.") for name in names) for key in keys]
    try:
        check_names([Component(name, nn.Identity) for name in names])
    except UsageError:
        assert max(owners) > 1
    else:
        assert max(owners) == 1


class Sliced(nn.Module):
    """Has a parameter with gaps in its memory, and a complex buffer."""

    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6)[:, :3])
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_are_dense_and_buffers_stay_complex(dtype: torch.dtype) -> None:
    module, plain = build_component(Component("a", Sliced), 0, dtype=dtype), Sliced()
    assert is_dense(module.get_parameter("weight"))
    assert not is_dense(plain.weight)
    assert module.get_buffer("turns").equal(plain.turns.to(dtype.to_complex()))


def test_a_complex_parameter_is_refused() -> None:
    def build() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        return module

    with pytest.raises(UsageError, match="parameter weight of component 'a' is complex: make"):
        boundaries([Component("a", build)], 8)
