import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hvdtrain.models.component import parameter_count
from hvdtrain.models.resnet import resnet18


def batch_norm(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    mean = x.mean((0, 2, 3), keepdim=True)
    variance = ((x - mean) ** 2).mean((0, 2, 3), keepdim=True)
    scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return (x - mean) / (variance + 1e-5).sqrt() * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)


def independent_forward(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """ResNet-18 in training mode, written down from table 1 and figure 2 of the paper."""
    kernel = weights["stem.conv1.weight"]
    if kernel.shape[-1] == 7:
        x = functional.conv2d(x, kernel, stride=2, padding=3)
        x = functional.max_pool2d(batch_norm(weights, "stem.bn1", x).clamp(min=0), 3, 2, 1)
    else:
        x = batch_norm(weights, "stem.bn1", functional.conv2d(x, kernel, padding=1)).clamp(min=0)
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            name, stride = f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1
            y = functional.conv2d(x, weights[f"{name}.conv1.weight"], stride=stride, padding=1)
            y = batch_norm(weights, f"{name}.bn1", y).clamp(min=0)
            y = functional.conv2d(y, weights[f"{name}.conv2.weight"], padding=1)
            y = batch_norm(weights, f"{name}.bn2", y)
            if stride == 2:
                x = functional.conv2d(x, weights[f"{name}.downsample.0.weight"], stride=2)
                x = batch_norm(weights, f"{name}.downsample.1", x)
            x = (x + y).clamp(min=0)
    return x.mean((2, 3)) @ weights["head.fc.weight"].T + weights["head.fc.bias"]


def test_parameter_counts_are_the_known_ones() -> None:
    assert parameter_count(resnet18(10, 32)) == 11_173_962
    assert parameter_count(resnet18(1000, 224)) == 11_689_512


def test_components_are_stem_blocks_and_head() -> None:
    blocks = [f"layer{layer}.{block}" for layer in (1, 2, 3, 4) for block in (0, 1)]
    assert [component.name for component in resnet18(10, 32)] == ["stem", *blocks, "head"]


def test_small_images_up_to_64_pixels_get_the_small_stem() -> None:
    assert parameter_count(resnet18(10, 65)) - parameter_count(resnet18(10, 64)) == 64 * 3 * 40


@pytest.mark.parametrize("image_size", [15, 72])
def test_logits_and_gradients_equal_an_independent_version(
    assemble: Any, images_and_labels: Any, largest_difference: Any, image_size: int
) -> None:
    model = assemble(resnet18(10, image_size), dtype=torch.float64)
    with torch.no_grad():  # so that scale and shift of the batch norms take part
        for name, value in model.parameters.items():
            if value.dim() == 1:
                value.add_(torch.linspace(-0.2, 0.3, len(value)).flip(0) * len(name) / 20)
    images, labels = images_and_labels(3, image_size, 10, torch.float64)
    weights = {
        name: value.detach().clone().requires_grad_() for name, value in model.parameters.items()
    }
    logits = independent_forward(weights, images)
    assert torch.allclose(model.forward(images), logits, rtol=0, atol=1e-12)
    loss = functional.cross_entropy(logits, labels)
    gradients = torch.autograd.grad(loss, list(weights.values()))
    expected = dict(zip(weights, gradients, strict=True))
    assert largest_difference(model.gradients(images, labels), expected) <= 1e-12


def test_convolutions_start_as_he_normal_of_fan_out(assemble: Any) -> None:
    parameters = assemble(resnet18(10, 32)).parameters
    for name in ("stem.conv1", "layer1.0.conv2", "layer2.0.downsample.0", "layer4.1.conv2"):
        weight = parameters[f"{name}.weight"].detach()
        fan_out = weight.shape[0] * weight.shape[2] * weight.shape[3]
        assert float(weight.std()) == pytest.approx(math.sqrt(2 / fan_out), rel=0.06)
