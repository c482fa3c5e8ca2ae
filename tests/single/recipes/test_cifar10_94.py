"""The parts of the recipe of 94 %: network, whitening, moves of images, and their views."""

from functools import partial

import cifar10_94
import cifar10_others
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from hvdtrain import Component
from hvdtrain.errors import UsageError
from hvdtrain.models.component import (
    build_component,
    build_started,
    parameter_count,
    start_of,
)


def test_it_is_the_network_of_the_paper() -> None:
    parts = cifar10_94.network(10)
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
    block = build_component(cifar10_94.network(10)[1], 0)
    assert isinstance(block, nn.Sequential)
    x = torch.randn(1, 24, 8, 8)
    torch.testing.assert_close(block[0](x)[:, :24], x)
    trained = {name for name, value in block.named_parameters() if value.requires_grad}
    assert "norm1.bias" in trained
    assert "norm1.weight" not in trained


def smooth_images(count: int) -> torch.Tensor:
    """Return images whose neighbouring pixels and channels are correlated."""
    noise = torch.randn(count, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    smooth = functional.avg_pool2d(noise, 5, 1, padding=2) * 3
    smooth[:, 1:] += smooth[:, :1]
    return smooth


def test_outputs_on_the_images_are_uncorrelated_and_of_variance_one() -> None:
    images = smooth_images(220)
    stem = cifar10_94.network(10)[0]
    started = Component("stem", partial(build_started, stem, start_of(stem, images)))
    weights = dict(build_component(started, 0).named_parameters())["conv.weight"]
    assert not weights.requires_grad
    torch.testing.assert_close(weights[12:], -weights[:12])

    def covariance(filters: torch.Tensor) -> torch.Tensor:
        outputs = functional.conv2d(images, filters).transpose(0, 1).reshape(12, -1)
        return torch.cov(outputs)

    measured = covariance(weights[:12])
    deviation = measured.diag()
    # patterns whose variance is near EPSILON are made smaller
    assert (deviation > 0.5).all()
    assert (deviation < 1.001).all()
    assert (deviation[:4] > 0.99).all()
    assert (measured - torch.diag(deviation)).abs().max() < 1e-3
    control = covariance(torch.randn(12, 3, 2, 2, generator=torch.Generator().manual_seed(1)))
    assert (control - torch.diag(control.diag())).abs().max() > 0.1


def test_a_start_of_another_shape_is_refused() -> None:
    part = Component("stem", partial(nn.Conv2d, 3, 4, 2), lambda _: {"weight": torch.zeros(4)})
    with pytest.raises(UsageError, match=r"the start of component 'stem' returned 'weight' of sh"):
        start_of(part, torch.zeros(1, 3, 4, 4))


def test_a_start_without_names_is_refused() -> None:
    part = Component("stem", partial(nn.Conv2d, 3, 4, 2), lambda _: [torch.zeros(4)])  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match="returned a list: return a dictionary of tensors"):
        start_of(part, torch.zeros(1, 3, 4, 4))


def some_images(count: int, height: int = 9, width: int = 7) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def test_a_crop_moves_mirrors_and_reflects_each_image() -> None:
    images = some_images(25)
    down, right = np.divmod(np.arange(25), 5)
    is_mirrored = np.arange(25) % 2 == 1
    moved = cifar10_94.crop(images, down - 2, right - 2, is_mirrored)
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), "reflect")
    for n in range(25):
        expected = padded[n, 4 - down[n] : 13 - down[n], 4 - right[n] : 11 - right[n]]
        np.testing.assert_array_equal(moved[n], expected[:, ::-1] if n % 2 else expected)


def test_an_image_is_mirrored_in_every_second_epoch_and_moved_by_its_seed_alone() -> None:
    images, plain = some_images(4000), cifar10_94.Moves(0)
    seeds = np.random.default_rng(1).integers(0, 2**64, 4000, dtype=np.uint64)
    first, second, third = (plain(images, seeds, epoch) for epoch in range(3))
    is_mirrored = (first == images[:, :, ::-1]).all((1, 2, 3))
    assert abs(is_mirrored.mean() - 0.5) < 0.03
    np.testing.assert_array_equal(first, second[:, :, ::-1])
    np.testing.assert_array_equal(first, third)
    moved = cifar10_94.augment(images, seeds, 3)
    np.testing.assert_array_equal(moved[7:9], cifar10_94.augment(images[7:9], seeds[7:9], 3))
    assert (moved != cifar10_94.augment(images, seeds, 5)).any()


def test_the_weights_of_views_add_up_to_one_and_mirror_images_weigh_the_same() -> None:
    images, views = some_images(3), cifar10_94.augment.views
    seen = [view(images) for _, view in views]
    assert len({pixels.tobytes() for pixels in seen}) == len(views) == 6
    assert sum(weight for weight, _ in views) == 1
    np.testing.assert_array_equal(seen[0], images)
    for plain, mirrored in zip(seen[::2], seen[1::2], strict=True):
        np.testing.assert_array_equal(plain[:, :, ::-1], mirrored)


def test_a_square_is_blanked_in_each_moved_image() -> None:
    images = np.full((300, 32, 32, 3), 255, np.uint8)
    seeds = np.random.default_rng(1).integers(0, 2**64, 300, dtype=np.uint64)
    made = cifar10_others.cutout(images, seeds, 0)
    assert (images == 255).all()
    blank = (made == cifar10_others.MEAN).all(axis=3).sum((1, 2))
    assert blank.max() == 64
    assert blank.min() >= 16
    assert set(np.unique(made)) == {0, 255, *cifar10_others.MEAN.tolist()}
