"""The network of arXiv 2404.00498."""

import pytest
import torch
from torch import nn

from hvdtrain import models
from hvdtrain.errors import UsageError
from hvdtrain.models.component import build_component, parameter_count


def test_it_is_the_network_of_the_paper() -> None:
    parts = models.components("airbench", 10, 32)
    assert [part.name for part in parts] == ["stem", "block1", "block2", "block3", "head"]
    # the first convolution, six others, six shifts and six fixed scales, the last layer
    convolutions = 24 * 3 * 4 + 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256)
    assert parameter_count(parts) == convolutions + 4 * (64 + 256 + 256) + 10 * 256
    modules = [build_component(part, 0).eval() for part in parts]
    images = torch.randn(2, 3, 32, 32)
    sizes = []
    for module in modules:
        images = module(images)
        sizes.append(tuple(images.shape[1:]))
    assert sizes == [(24, 31, 31), (64, 15, 15), (256, 7, 7), (256, 3, 3), (10,)]


def test_each_block_starts_as_the_identity_of_its_first_channels() -> None:
    block = build_component(models.components("airbench", 10, 32)[1], 0)
    assert isinstance(block, nn.Sequential)
    x = torch.randn(1, 24, 8, 8)
    torch.testing.assert_close(block[0](x)[:, :24], x)
    trained = {name for name, value in block.named_parameters() if value.requires_grad}
    assert "norm1.bias" in trained
    assert "norm1.weight" not in trained


def test_images_that_are_too_small_are_refused() -> None:
    models.components("airbench", 10, 9)
    with pytest.raises(UsageError, match="at least 9"):
        models.components("airbench", 10, 8)
