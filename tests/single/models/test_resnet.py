import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hvdtrain.models.component import parameter_count
from hvdtrain.models.resnet import resnet18, resnet50


def batch_norm(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    mean = x.mean((0, 2, 3), keepdim=True)
    variance = ((x - mean) ** 2).mean((0, 2, 3), keepdim=True)
    scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return (x - mean) / (variance + 1e-5).sqrt() * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)


def strided(layer: int, block: int) -> int:
    return 2 if layer > 1 and block == 0 else 1


def basic_block(weights: dict[str, Tensor], name: str, x: Tensor, stride: int) -> Tensor:
    y = functional.conv2d(x, weights[f"{name}.conv1.weight"], stride=stride, padding=1)
    y = batch_norm(weights, f"{name}.bn1", y).clamp(min=0)
    y = functional.conv2d(y, weights[f"{name}.conv2.weight"], padding=1)
    return batch_norm(weights, f"{name}.bn2", y)


def bottleneck(weights: dict[str, Tensor], name: str, x: Tensor, stride: int) -> Tensor:
    y = functional.conv2d(x, weights[f"{name}.conv1.weight"])
    y = batch_norm(weights, f"{name}.bn1", y).clamp(min=0)
    y = functional.conv2d(y, weights[f"{name}.conv2.weight"], stride=stride, padding=1)
    y = batch_norm(weights, f"{name}.bn2", y).clamp(min=0)
    y = functional.conv2d(y, weights[f"{name}.conv3.weight"])
    return batch_norm(weights, f"{name}.bn3", y)


def independent_forward(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Compute a ResNet in training mode, from table 1 and figures 2 and 5 of the paper."""
    depths, block_of = (2, 2, 2, 2), basic_block
    if "layer1.2.conv3.weight" in weights:
        depths, block_of = (3, 4, 6, 3), bottleneck
    kernel = weights["stem.conv1.weight"]
    if kernel.shape[-1] == 7:
        x = functional.conv2d(x, kernel, stride=2, padding=3)
        x = functional.max_pool2d(batch_norm(weights, "stem.bn1", x).clamp(min=0), 3, 2, 1)
    else:
        x = batch_norm(weights, "stem.bn1", functional.conv2d(x, kernel, padding=1)).clamp(min=0)
    for layer, depth in enumerate(depths, 1):
        for block in range(depth):
            name, stride = f"layer{layer}.{block}", strided(layer, block)
            y = block_of(weights, name, x, stride)
            if x.shape != y.shape:
                x = functional.conv2d(x, weights[f"{name}.downsample.0.weight"], stride=stride)
                x = batch_norm(weights, f"{name}.downsample.1", x)
            x = (x + y).clamp(min=0)
    return x.mean((2, 3)) @ weights["head.fc.weight"].T + weights["head.fc.bias"]


def test_parameter_counts_are_the_known_ones() -> None:
    assert parameter_count(resnet18(10, 32)) == 11_173_962
    assert parameter_count(resnet18(1000, 224)) == 11_689_512
    assert parameter_count(resnet50(10, 32)) == 23_520_842
    assert parameter_count(resnet50(1000, 224)) == 25_557_032


def test_components_are_stem_blocks_and_head() -> None:
    blocks = [f"layer{layer}.{block}" for layer in (1, 2, 3, 4) for block in (0, 1)]
    assert [component.name for component in resnet18(10, 32)] == ["stem", *blocks, "head"]
    assert len(resnet50(10, 32)) == 1 + 3 + 4 + 6 + 3 + 1


def test_small_images_up_to_64_pixels_get_the_small_stem() -> None:
    assert parameter_count(resnet18(10, 65)) - parameter_count(resnet18(10, 64)) == 64 * 3 * 40


@pytest.mark.parametrize(
    ("build", "image_size"),
    [
        *((resnet18, 15), (resnet18, 72)),
        *(pytest.param(resnet50, size, marks=pytest.mark.weekly) for size in (15, 72)),
    ],
)
def test_logits_and_gradients_equal_an_independent_version(
    assemble: Any, images_and_labels: Any, largest_difference: Any, build: Any, image_size: int
) -> None:
    model = assemble(build(10, image_size), dtype=torch.float64)
    with torch.no_grad():  # so that scale and shift of the batch norms have an effect
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
    bound = 1e-11 if build is resnet50 else 1e-12
    assert largest_difference(model.gradients(images, labels), expected) <= bound


def test_convolutions_start_as_he_normal_of_fan_out(assemble: Any) -> None:
    parameters = assemble(resnet18(10, 32)).parameters
    for name in ("stem.conv1", "layer1.0.conv2", "layer2.0.downsample.0", "layer4.1.conv2"):
        weight = parameters[f"{name}.weight"].detach()
        fan_out = weight.shape[0] * weight.shape[2] * weight.shape[3]
        assert float(weight.std()) == pytest.approx(math.sqrt(2 / fan_out), rel=0.06)
