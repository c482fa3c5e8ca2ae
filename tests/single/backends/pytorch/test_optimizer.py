import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.backends.pytorch.optimizers import (
    make_optimizer,
    set_slow_share,
)
from hvdtrain.backends.pytorch.parts import build_model, stage_optimizer
from hvdtrain.backends.pytorch.state import restore_state, state_by_name, state_shapes
from hvdtrain.config import TrainConfig
from hvdtrain.engine.progress import learning_rate, slow_share
from hvdtrain.errors import UsageError
from hvdtrain.models import vit
from hvdtrain.models.component import Component


def config(**values: Any) -> TrainConfig:
    return TrainConfig(**{"model": "cnn", "data": "d", "epochs": 10, "batch_size": 10, **values})


def rates(**values: Any) -> list[float]:
    """Return the learning rates of the 100 steps of 10 epochs of 100 samples."""
    return [learning_rate(config(lr=1.0, **values), 100, p) for p in range(0, 1000, 10)]


def test_constant_stays() -> None:
    assert rates() == [1.0] * 100


def test_warm_up_rises_evenly_to_the_peak() -> None:
    seen = rates(warmup_epochs=1.0)
    assert seen[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert seen[10:] == [1.0] * 90


def test_cosine_falls_from_the_peak_to_zero_after_warm_up() -> None:
    seen = rates(warmup_epochs=2.0, lr_schedule="cosine")
    assert seen[20] == 1.0
    assert seen[60] == pytest.approx(0.5)
    assert 0 < seen[-1] < 0.001
    assert seen[20:] == sorted(seen[20:], reverse=True)


def test_step_falls_to_a_tenth_at_half_and_at_three_quarters() -> None:
    assert rates(lr_schedule="step") == [1.0] * 50 + [0.1] * 25 + [0.01] * 25


def test_a_line_falls_from_the_peak_to_its_end_after_the_warm_up() -> None:
    seen = rates(warmup_epochs=2.0, lr_schedule="linear", lr_end=0.1)
    assert seen[19] == seen[20] == 1.0
    assert seen[60] == pytest.approx(0.55)
    assert seen[-1] == pytest.approx(0.1 + 0.9 / 80)


def test_cosine_can_end_above_zero() -> None:
    seen = rates(lr_schedule="cosine", lr_end=0.1)
    assert seen[50] == pytest.approx(0.55)
    assert seen[-1] == pytest.approx(0.1, abs=0.001)


def test_slow_weights_meet_in_every_nth_step_of_all_epochs_and_after_the_last() -> None:
    # 3 steps in an epoch of 25 samples, the last one of 5
    settings = config(epochs=3, lookahead=4)
    starts = [25 * epoch + 10 * step for epoch in range(3) for step in range(3)]
    shares = [slow_share(settings, 25, start) for start in starts]
    met = {step + 1: share for step, share in enumerate(shares) if share is not None}
    assert met == {
        4: pytest.approx(0.77 * (25 / 75) ** 3),
        8: pytest.approx(0.77 * (60 / 75) ** 3),
        9: pytest.approx(0.77 * (70 / 75) ** 3),
    }
    assert slow_share(config(), 25, 70) is None


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        ("sgd", lambda values: torch.optim.SGD(values, 0.1, 0.9, 0, 0.01, True)),
        ("adam", lambda values: torch.optim.Adam(values, 0.1, weight_decay=0.01)),
        ("adamw", lambda values: torch.optim.AdamW(values, 0.1, weight_decay=0.01)),
    ],
)
def test_steps_are_those_of_torch(kind: str, plain: Callable[..., torch.optim.Optimizer]) -> None:
    settings, weights = config(optimizer=kind, lr=0.1, weight_decay=0.01), []
    makers = (lambda values: make_optimizer(settings, {"weight": values[0]}), plain)
    for make in makers:
        weight = nn.Parameter(torch.linspace(-1, 1, 24))
        optimizer = make([weight])
        for step in range(5):
            optimizer.zero_grad()
            torch.sin(weight * (step + 1)).sum().backward()
            optimizer.step()
        assert weight.grad is not None
        assert not weight.grad.requires_grad
        weights.append(weight.detach())
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize(
    ("kinds", "undecayed"),
    [
        ("none", set[str]()),
        ("norm", {"a.ln_1.weight", "a.ln_1.bias"}),
        (
            "norm,bias",
            {"a.ln_1.weight", "a.ln_1.bias", "a.in_proj.bias", "a.out_proj.bias"}
            | {"embed.conv_proj.bias"},
        ),
        ("position", {"embed.class_token", "embed.pos_embedding"}),
    ],
)
def test_what_is_not_to_decay_does_not(kinds: str, undecayed: set[str]) -> None:
    """A step of AdamW with a gradient of zero only applies weight decay."""
    components = [
        Component("embed", partial(vit.Embedding, 8, 4, 12)),
        Component("a", partial(vit.Attention, 12, 3)),
    ]
    settings = config(optimizer="adamw", lr=0.1, weight_decay=0.5, no_decay=kinds).check()
    model = build_model(components, settings, torch.device("cpu"))
    parameters = model.parameters()
    before = {}
    for name, value in parameters.items():
        value.data += 1.0
        before[name], value.grad = value.detach().clone(), torch.zeros_like(value)
    optimizer = stage_optimizer(settings, model)
    assert optimizer is not None
    optimizer.step()
    same = {name for name, value in parameters.items() if torch.equal(value, before[name])}
    assert same == undecayed


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="--no-decay norms is not known: use some of norm,"):
        config(no_decay="norms").check()


@pytest.mark.proves(
    "The check of a built-in model before the first step does not load PyTorch's compiler."
)
def test_a_rank_loads_no_compiler() -> None:
    """Torch's compiler would take a third of a rank's start-up time, SymPy a sixth."""
    program = (
        "import sys\n"
        "import torch\n"
        "from hvdtrain.config import TrainConfig\n"
        "from hvdtrain.backends.pytorch.batches import check_sizes, input_boundaries\n"
        "from hvdtrain.backends.pytorch.optimizers import make_optimizer\n"
        "from hvdtrain.data.index import TargetForm\n"
        "from hvdtrain.models import components\n"
        "from hvdtrain.plan.plan import replicated\n"
        "weight = torch.nn.Parameter(torch.ones(3))\n"
        "config = TrainConfig(model='cnn', data='d', epochs=1, batch_size=1)\n"
        "optimizer = make_optimizer(config, {'weight': weight})\n"
        "weight.sum().backward()\n"
        "optimizer.step()\n"
        "optimizer.zero_grad()\n"
        "parts = components('resnet18', 10, 32)\n"
        "inputs = input_boundaries(parts, config, 32, TargetForm((), 'int64', 10))\n"
        "plan = replicated([part.name for part in parts], 2, 1, None)\n"
        "check_sizes(config, plan, parts, inputs, [64, 3])\n"
        "print({'torch._dynamo', 'sympy'} & set(sys.modules))\n"
    )
    printed = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert printed == "set()\n"


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_a_restored_optimizer_goes_on_to_the_bit(kind: str) -> None:
    settings = config(optimizer=kind, lr=0.1, weight_decay=0.01)

    def make() -> dict[str, nn.Parameter]:
        values = torch.linspace(-1, 1, 24).view(2, 3, 2, 2)
        weight = values.to(memory_format=torch.channels_last)
        return {"a": nn.Parameter(weight), "b": nn.Parameter(torch.ones(3))}

    def run(parameters: dict[str, nn.Parameter], optimizer: Any, steps: range) -> None:
        for step in steps:
            for parameter in parameters.values():
                parameter.grad = torch.sin(parameter.detach() * (step + 1))
            optimizer.step()

    whole = make()
    run(whole, make_optimizer(settings, whole), range(6))
    first = make()
    optimizer = make_optimizer(settings, first)
    run(first, optimizer, range(3))
    second = make()
    again = make_optimizer(settings, second)
    with torch.no_grad():
        for name, parameter in second.items():
            parameter.copy_(first[name])
    restore_state(again, second, state_by_name(optimizer, first))
    run(second, again, range(3, 6))
    for name, parameter in whole.items():
        assert torch.equal(parameter, second[name])


def slope(weight: torch.Tensor, step: int) -> torch.Tensor:
    return torch.cos(weight.detach() * (step + 1))


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_lookahead_is_its_formula_and_resumes_exactly(kind: str) -> None:
    settings = config(optimizer=kind, lr=0.1, weight_decay=0.1, lookahead=2)
    plain_settings = config(optimizer=kind, lr=0.1, weight_decay=0.1)

    def step(optimizer: Any, weight: nn.Parameter, number: int, share: float | None) -> None:
        set_slow_share(optimizer, share)
        weight.grad = slope(weight, number)
        optimizer.step()

    weight, fast = (nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2))
    optimizer = make_optimizer(settings, {"weight": weight})
    plain = make_optimizer(plain_settings, {"weight": fast})
    slow = fast.detach().clone()
    shares = [None, 0.25, None, 0.75, None, 0.5]
    for number, share in enumerate(shares):
        step(optimizer, weight, number, share)
        step(plain, fast, number, None)
        if number == 0:
            slow = fast.detach().clone()
        if share is not None:
            slow = share * slow + (1 - share) * fast.detach()
            fast.data.copy_(slow)
        torch.testing.assert_close(weight.detach(), fast.detach())
        if number == 2:
            again = nn.Parameter(weight.detach().clone())
            resumed = make_optimizer(settings, {"weight": again})
            state = state_by_name(optimizer, {"weight": weight})
            shapes = {key: tuple(value.shape) for key, value in state["weight"].items()}
            assert shapes == state_shapes(settings, weight.shape)
            restore_state(resumed, {"weight": again}, state)
    for number in range(3, len(shares)):
        step(resumed, again, number, shares[number])
    assert torch.equal(again, weight)
