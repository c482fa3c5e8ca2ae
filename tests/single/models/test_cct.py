"""Compact convolutional transformers."""

import pytest
import torch
from torch.nn import functional

from hvdtrain import models
from hvdtrain.errors import UsageError
from hvdtrain.models import vit
from hvdtrain.models.component import build_component, parameter_count


@pytest.mark.parametrize(
    ("name", "width", "depth", "hidden"), [("cct_2", 128, 2, 128), ("cct_6", 256, 6, 512)]
)
def test_sizes_are_those_of_the_paper(name: str, width: int, depth: int, hidden: int) -> None:
    parts = models.components(name, 10, 32)
    tokens = 9 * (3 * 64 + 64 * width) + 64 * width
    attention = 2 * width + 4 * width * width + 4 * width
    mlp = 2 * width + 2 * width * hidden + hidden + width
    head = 2 * width + width + 1 + 10 * width + 10
    assert parameter_count(parts) == tokens + depth * (attention + mlp) + head
    assert f"{parameter_count(parts):,}" in (vit.cct_2.__doc__ or "") + (vit.cct_6.__doc__ or "")


@pytest.mark.parametrize(("size", "count"), [(32, 64), (31, 64), (8, 4), (4, 1)])
def test_tokens_are_the_pooled_pixels(size: int, count: int) -> None:
    stem = build_component(models.components("cct_2", 10, size)[0], 0)
    images = torch.randn(2, 3, size, size)
    weights = dict(stem.named_parameters())
    x = images
    for name in ("conv1", "conv2"):
        x = functional.max_pool2d(
            functional.relu(functional.conv2d(x, weights[f"{name}.weight"], padding=1)), 3, 2, 1
        )
    expected = x.flatten(2).transpose(1, 2) + weights["pos_embedding"]
    torch.testing.assert_close(stem(images), expected)
    assert expected.shape == (2, count, 128)


def test_the_head_takes_the_weighted_mean_of_the_tokens() -> None:
    head = build_component(models.components("cct_2", 5, 8)[-1], 0)
    weights = dict(head.named_parameters())
    tokens = torch.randn(3, 4, 128)
    normal = functional.layer_norm(tokens, (128,), eps=1e-6)
    for image, logits in zip(normal, head(tokens), strict=True):
        shares = (image @ weights["weigh.weight"][0] + weights["weigh.bias"]).exp()
        mean = (shares / shares.sum()) @ image
        expected = mean @ weights["fc.weight"].T + weights["fc.bias"]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_images_that_are_too_small_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 4"):
        models.components("cct_6", 10, 3)
