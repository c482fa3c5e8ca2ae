"""Gradients on the GPU are those of the CPU."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hvdtrain.backends.pytorch.parts import build_model
from hvdtrain.config import TrainConfig
from hvdtrain.models import MODEL_NAMES, components

CLASSES, SIZE, IMAGES = 5, 16, 12


def gradients(model: str, device: str, precision: str = "fp64") -> dict[str, Tensor]:
    """Return the gradients of one step on images that depend on nothing, on the CPU."""
    config = TrainConfig(model=model, data="none", precision="fp64")
    stage = build_model(components(model, CLASSES, SIZE), config, torch.device(device))
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES, 3, SIZE, SIZE, dtype=torch.float64, generator=draw)
    labels = torch.arange(IMAGES) % CLASSES
    images = images.to(device, memory_format=torch.channels_last)
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
        logits = stage(images.float() if precision == "bf16" else images)
    functional.cross_entropy(logits.double(), labels.to(device)).backward()
    return {
        name: value.grad.cpu()
        for name, value in stage.parameters().items()
        if value.grad is not None
    }


def largest_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    errors = [
        float((ours[name] - value).abs().max() / value.abs().max().clamp_min(1e-12))
        for name, value in theirs.items()
    ]
    return max(errors)


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_every_gradient_in_fp64_is_that_of_the_cpu(model: str, device: str) -> None:
    assert largest_error(gradients(model, device), gradients(model, "cpu")) < 1e-8


def test_the_comparison_finds_a_fault(device: str) -> None:
    serial, other = (gradients(model, device) for model in ("cnn", "cnn"))
    name = next(iter(other))
    other[name] = other[name] * (1 + 1e-6)
    assert largest_error(other, serial) > 1e-8
