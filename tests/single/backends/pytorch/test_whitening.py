"""Whitening filters, and the component that has them."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from hvdtrain.backends.pytorch.whitening import (
    EPSILON,
    build_whitened,
    check_whitening,
    whitening_filters,
)
from hvdtrain.errors import UsageError
from hvdtrain.models.component import Component, build_component
from hvdtrain.parallel.stage import Images

NORMAL = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def smooth_images(count: int) -> np.ndarray:
    """Return images whose neighbouring pixels and channels are correlated."""
    noise = torch.randn(count, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    smooth = functional.avg_pool2d(noise, 5, 1, padding=2) * 3
    smooth[:, 1:] += smooth[:, :1]
    images: np.ndarray = (
        (128 + 60 * smooth).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    )
    return images


def test_outputs_on_the_images_are_uncorrelated_and_of_variance_one() -> None:
    images = smooth_images(200)
    filters = whitening_filters(images, NORMAL, (2, 2))
    assert filters.shape == (24, 3, 2, 2)
    assert filters.dtype == torch.float32
    torch.testing.assert_close(filters[12:], -filters[:12])
    pixels = Images(*NORMAL, torch.device("cpu"), "fp32")(images)

    def covariance(weights: torch.Tensor) -> torch.Tensor:
        outputs = functional.conv2d(pixels, weights).transpose(0, 1).reshape(12, -1)
        return torch.cov(outputs)

    measured = covariance(filters[:12])
    deviation = measured.diag()
    # patterns whose variance is near EPSILON are made smaller
    assert (deviation > 0.5).all()
    assert (deviation < 1.001).all()
    assert (deviation[:4] > 0.99).all()
    assert (measured - torch.diag(deviation)).abs().max() < 1e-3
    control = covariance(torch.randn(12, 3, 2, 2, generator=torch.Generator().manual_seed(1)))
    assert (control - torch.diag(control.diag())).abs().max() > 0.1


@pytest.mark.parametrize("channels", [10, 24, 30])
def test_a_convolution_keeps_its_other_filters_and_is_not_trained(channels: int) -> None:
    component = Component("stem", lambda: nn.Sequential(nn.Conv2d(3, channels, 2), nn.ReLU()))
    filters = torch.arange(24 * 12, dtype=torch.float32).view(24, 3, 2, 2)
    plain = dict(build_component(component, 0).named_parameters())
    stem = Component("stem", partial(build_whitened, component, filters))
    whitening = dict(build_component(stem, 0).named_parameters())
    used = min(24, channels)
    assert torch.equal(whitening["0.weight"][:used], filters[:used])
    assert torch.equal(whitening["0.weight"][used:], plain["0.weight"][used:])
    assert not whitening["0.weight"].requires_grad
    assert whitening["0.bias"].requires_grad


def test_blocks_of_images_and_patches_far_apart_give_the_covariance_of_all() -> None:
    """Patches of large images take more memory than there is: some of them must do."""
    images = smooth_images(120)
    flat = Images(*NORMAL, torch.device("cpu"), "fp64")(images).unfold(2, 2, 1).unfold(3, 2, 1)
    patches = flat.permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
    variances, _ = torch.linalg.eigh(torch.cov(patches.T))
    filters = whitening_filters(images, NORMAL, (2, 2))
    expected = 1 / torch.sqrt(variances.flip(0) + EPSILON)
    torch.testing.assert_close(
        filters[:12].flatten(1).norm(dim=1).double(), expected, rtol=1e-3, atol=0
    )
    large = np.kron(images[:3], np.ones((1, 15, 15, 1), np.uint8))
    assert whitening_filters(large, NORMAL, (7, 7)).shape == (2 * 147, 3, 7, 7)


@pytest.mark.parametrize(
    ("stem", "message"),
    [
        (nn.Flatten, "--whiten needs a model whose first component has a convolution of 3"),
        (partial(nn.Conv2d, 4, 4, 2), "--whiten needs a model whose first component"),
        (partial(nn.Conv2d, 3, 4, 9), "--whiten needs images of at least 9 pixels a side"),
    ],
)
def test_a_model_that_cannot_whiten_is_refused(stem: Any, message: str) -> None:
    parts = [Component("stem", stem), Component("conv", partial(nn.Conv2d, 3, 4, 2))]
    with pytest.raises(UsageError, match=message):
        check_whitening("a:b", parts, 8)
