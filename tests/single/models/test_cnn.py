import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hvdtrain.errors import UsageError
from hvdtrain.models.component import parameter_count
from hvdtrain.models.resnet import cnn


def independent_forward(weights: dict[str, Tensor], images: Tensor) -> Tensor:
    """Compute convolutions as sums over shifted images, pooling as maxima over 2 x 2 tiles."""
    x = images
    for name in ("conv1", "conv2"):
        height, width = x.shape[2:]
        kernel, padded = weights[f"{name}.conv.weight"], functional.pad(x, (1, 1, 1, 1))
        total = weights[f"{name}.conv.bias"].view(-1, 1, 1)
        for row in range(3):
            for column in range(3):
                window = padded[:, :, row : row + height, column : column + width]
                total = total + torch.einsum("nchw,oc->nohw", window, kernel[:, :, row, column])
        kept = total.clamp(min=0)[:, :, : height // 2 * 2, : width // 2 * 2]
        x = kept.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax(dim=(3, 5))
    x = x.reshape(len(x), -1) @ weights["dense.linear.weight"].T + weights["dense.linear.bias"]
    return x.clamp(min=0) @ weights["head.weight"].T + weights["head.bias"]


@pytest.mark.proves(
    "Models have the parameter counts of their publications, and are computed as published."
)
def test_it_has_the_parameters_of_the_paper() -> None:
    assert parameter_count(cnn(10, 32)) == 282_250
    assert [component.name for component in cnn(10, 32)] == ["conv1", "conv2", "dense", "head"]


@pytest.mark.parametrize(("image_size", "classes"), [(32, 10), (4, 1), (7, 33), (33, 5)])
def test_logits_and_gradients_equal_an_independent_version(
    assemble: Any,
    images_and_labels: Any,
    largest_difference: Any,
    image_size: int,
    classes: int,
) -> None:
    model = assemble(cnn(classes, image_size), dtype=torch.float64)
    images, labels = images_and_labels(5, image_size, classes, torch.float64)
    weights = {
        name: value.detach().clone().requires_grad_() for name, value in model.parameters.items()
    }
    logits = independent_forward(weights, images)
    assert logits.shape == (5, classes)
    assert torch.allclose(model.forward(images), logits, rtol=0, atol=1e-12)
    if classes == 1:  # the loss of one class is constant: use the logits
        gradients = torch.autograd.grad(logits.sum(), list(weights.values()))
        model.forward(images).sum().backward()
        actual = {name: value.grad for name, value in model.parameters.items()}
    else:
        loss = functional.cross_entropy(logits, labels)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        actual = model.gradients(images, labels)
    assert largest_difference(actual, dict(zip(weights, gradients, strict=True))) <= 1e-12


def test_weights_start_as_in_keras(assemble: Any) -> None:
    parameters = assemble(cnn(10, 32)).parameters
    fans = {
        "conv1.conv": (27, 288),
        "conv2.conv": (288, 576),
        "dense.linear": (4096, 64),
        "head": (64, 10),
    }
    for name, (fan_in, fan_out) in fans.items():
        limit = math.sqrt(6 / (fan_in + fan_out))
        weight = parameters[f"{name}.weight"].detach()
        assert 0.97 * limit < float(weight.abs().max()) <= limit
        assert float(weight.std()) == pytest.approx(limit / math.sqrt(3), rel=0.06)
        assert not parameters[f"{name}.bias"].any()


def test_images_too_small_for_two_poolings_are_refused() -> None:
    with pytest.raises(UsageError, match=r"images of 3 x 3: use an image size of at least 4"):
        cnn(10, 3)
