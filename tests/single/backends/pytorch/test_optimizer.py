import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.backends.pytorch.parts import make_optimizer
from hvdtrain.backends.pytorch.state import restore_state, state_by_name
from hvdtrain.config import TrainConfig
from hvdtrain.engine.progress import learning_rate


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


def test_a_line_falls_from_the_peak_to_zero_after_the_warm_up() -> None:
    seen = rates(warmup_epochs=2.0, lr_schedule="linear")
    assert seen[19] == seen[20] == 1.0
    assert seen[60] == pytest.approx(0.5)
    assert seen[-1] == pytest.approx(1 / 80)


@pytest.mark.proves(
    "The check of a built-in model before the first step does not load PyTorch's compiler."
)
def test_a_rank_loads_no_compiler() -> None:
    """Torch's compiler would take a third of a rank's start-up time, SymPy a sixth."""
    program = (
        "import sys\n"
        "import torch\n"
        "from hvdtrain.config import TrainConfig\n"
        "from hvdtrain.backends.pytorch.build import check_sizes, input_boundaries\n"
        "from hvdtrain.backends.pytorch.parts import make_optimizer\n"
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
