"""A component that mixes the samples of a batch is reported by `plan check` and `--verify`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import cli, models
from hvdtrain.check.plan import Mixing, find_mixing
from hvdtrain.errors import CheckFailed
from hvdtrain.models.component import Component

MODEL = f"{__name__}:centred"


class Centre(nn.Module):
    """Subtracts the mean of the batch: in training only, or always, or times a weight of zero."""

    def __init__(self, in_training_only: bool = False, weight: float = 1.0) -> None:
        super().__init__()
        self.in_training_only = in_training_only
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.in_training_only and not self.training:
            return inputs
        return inputs - self.weight * inputs.mean(0, keepdim=True)


class Counting(nn.Module):
    """Draws random numbers and counts its calls: its results differ from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.dropout(inputs, 0.5, self.training) + self.calls


class NormalisedGradient(torch.autograd.Function):
    """Divides the gradient by its norm over the batch."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.div(gradient, gradient.norm())


class InBackward(nn.Module):
    """Treats each sample alone in forward, in a layer whose gradients depend on the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Conv2d(8, 8, 1)
        self.table = nn.Embedding(4, 8, scale_grad_by_freq=kind == "frequencies")
        if kind == "limit":
            self.layer.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs)
        if self.kind == "norm":
            return NormalisedGradient.apply(outputs)  # type: ignore[no-any-return]
        tokens = (inputs.detach() > 0).sum(1) % 4
        return torch.add(outputs, self.table(tokens).permute(0, 3, 1, 2))


def model(middle: Callable[[], nn.Module], classes: int = 10) -> list[Component]:
    return [
        Component("stem", lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))),
        Component("middle", middle),
        Component("pool", lambda: nn.AdaptiveAvgPool2d(4)),
        Component("head", lambda: nn.Sequential(nn.Flatten(), nn.Linear(8 * 4 * 4, classes))),
    ]


def centred(classes: int, image_size: int) -> list[Component]:
    """Return a model that trains differently under plans that divide a batch."""
    return model(Centre, classes)


def images() -> Tensor:
    return torch.rand(5, 3, 8, 8)


@pytest.mark.parametrize(
    "middle",
    [Centre, lambda: Centre(True), lambda: Centre(weight=0.0)],
    ids=["always", "in training", "weight of zero"],
)
def test_a_component_that_mixes_samples_is_named(middle: Callable[[], nn.Module]) -> None:
    assert find_mixing(model(middle), images(), 0).module == "middle"


@pytest.mark.parametrize(
    ("kind", "module"),
    [("norm", "middle"), ("frequencies", "middle.table"), ("limit", "middle.layer"), ("none", "")],
)
def test_a_module_that_mixes_gradients_is_named(kind: str, module: str) -> None:
    """Serial and planned steps agree on such a model: both are divided in the same way."""
    assert find_mixing(model(lambda: InBackward(kind)), images(), 0) == Mixing(module)


@pytest.mark.parametrize("middle", [nn.ReLU, nn.Dropout, lambda: nn.BatchNorm2d(8), Counting])
def test_what_treats_each_sample_alone_is_not(middle: Callable[[], nn.Module]) -> None:
    unproved = ("middle",) if middle is Counting else ()
    assert find_mixing(model(middle), images(), 0) == Mixing("", unproved)


@pytest.mark.parametrize("name", ["cnn", "vit_tiny", "resnet18"])
def test_the_models_that_are_shipped_do_not_mix_samples(name: str) -> None:
    parts = models.components(name, 10, 32, None)
    assert find_mixing(parts, torch.rand(4, 3, 32, 32), 0) == Mixing()


def test_plan_check_and_verify_refuse_it_where_the_plan_divides_batches(
    capsys: pytest.CaptureFixture[str], small_set: Path, tmp_path: Path
) -> None:
    words = ["plan", "check", "--model", MODEL, "--ranks", "1", "--plan", "single", "--json"]
    words += ["--image-size", "8", "--batch-size", "8"]
    assert cli.run(words) == 0  # the batch is whole
    assert json.loads(capsys.readouterr().out)["mixing"] == ""
    assert cli.run([*words, "--microbatches", "2"]) == CheckFailed.exit_code
    assert json.loads(capsys.readouterr().out)["mixing"] == "middle"
    words = ["train", "--model", MODEL, "--data", str(small_set), "--run", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--max-steps", "2", "--microbatches", "2", "--verify"])
    assert end.value.code == CheckFailed.exit_code
    assert "the module middle mixes the samples of a batch" in capsys.readouterr().err
