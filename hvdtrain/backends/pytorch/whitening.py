"""Whitening of a model's first convolution from the patches of the training images."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Index
from hvdtrain.data.order import Rows
from hvdtrain.data.shards import open_split
from hvdtrain.engine.feed import Normalisation
from hvdtrain.errors import UsageError
from hvdtrain.models.component import IMAGE_CHANNELS, Component, build_for_shapes
from hvdtrain.parallel.stage import Images
from hvdtrain.world import World

IMAGES = 5000  # whose patches are measured
_BLOCK = 50  # images whose patches are in memory at a time
_PATCHES = 1024  # of an image: with small kernels all of those of 32x32 pixels
EPSILON = 5e-4  # added to the variances, so that those near 0 are not divided by


def build_whitened(component: Component, filters: Tensor) -> nn.Module:
    """Build a component whose first convolution whitens, with weights that are not trained.

    Args:
        filters: [n, channels, height, width] on the CPU. The convolution uses as many of them as
            it has; its other filters, if it has more, keep their initial weights.
    """
    module = component.build()
    weight = _first_convolution(module).weight
    with torch.no_grad():
        used = min(len(filters), len(weight))
        weight[:used] = filters[:used].to(weight)
    weight.requires_grad_(False)
    return module


def whitened(
    config: TrainConfig,
    components: Sequence[Component],
    index: Index,
    rows: Rows,
    normal: Normalisation,
    world: World,
) -> list[Component]:
    """Return the components with `--whiten`; rank 0 measures for all ranks. Collective.

    Args:
        rows: of the train split, to train on.
        normal: how the images are normalised.

    Raises:
        UsageError: if the model does not start with a convolution of images.
    """
    first, *others = components
    weight = check_whitening(config.model, components, index.image_shape[0]).weight
    filters = None
    if world.rank == 0:
        with open_split(index, "train") as samples:
            # In a random order of the file, so that classes that lie together all count.
            chosen = np.random.default_rng(config.seed).permutation(rows)[:IMAGES]
            images = samples.gather(np.sort(chosen)).images
        filters = whitening_filters(images, normal, (weight.shape[2], weight.shape[3])).numpy()
    shared = torch.from_numpy(world.broadcast(filters))
    return [replace(first, build=partial(build_whitened, first, shared)), *others]


def whitening_filters(
    images: np.ndarray, normal: Normalisation, kernel: tuple[int, int]
) -> Tensor:
    """Return filters whose outputs on these images are uncorrelated and of variance 1.

    They are the eigenvectors of the covariance of the patches, largest variance first, divided by
    the deviation (Page, "How to train your ResNet", 2019; Jordan, arXiv 2404.00498, section 3.2),
    and after all of them their negatives: an activation function that cuts off negative values
    would lose half of each.

    Args:
        images: uint8 [n, height, width, channels].
        kernel: height and width of the filters.

    Returns:
        fp32 [2 k, channels, height, width] where k = channels x height x width.
    """
    height, width = kernel
    channels = images.shape[3]
    normalised = Images(*normal, torch.device("cpu"), "fp64")
    size = channels * height * width
    products, sums, count = torch.zeros(size, size).double(), torch.zeros(size).double(), 0
    for start in range(0, len(images), _BLOCK):
        flat = _patches(normalised(images[start : start + _BLOCK]), kernel)
        products += flat.T @ flat
        sums += flat.sum(0)
        count += len(flat)
    mean = sums / count
    variances, vectors = torch.linalg.eigh(products / count - torch.outer(mean, mean))
    scaled = (vectors / torch.sqrt(variances.clamp_min(0) + EPSILON)).T.flip(0)
    filters = scaled.reshape(-1, channels, height, width)
    return torch.cat([filters, -filters]).float()


def _patches(pixels: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Return up to _PATCHES patches per image, fp64 [n, channels x height x width]."""
    height, width = kernel
    places = (pixels.shape[2] - height + 1) * (pixels.shape[3] - width + 1)
    stride = math.ceil(math.sqrt(places / _PATCHES))
    patches = pixels.unfold(2, height, stride).unfold(3, width, stride)
    return patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, pixels.shape[1] * height * width)


def _first_convolution(module: nn.Module, model: str = "") -> nn.Conv2d:
    """Return the convolution that images enter.

    Raises:
        UsageError: if there is none.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d) and layer.in_channels == IMAGE_CHANNELS:
            return layer
    raise UsageError(
        f"--whiten needs a model whose first component has a convolution of {IMAGE_CHANNELS} "
        f"channels, and {model} has none: leave --whiten out"
    )


def check_whitening(model: str, components: Sequence[Component], image_size: int) -> nn.Conv2d:
    """Return the first convolution of a model, without its weights.

    Raises:
        UsageError: if it cannot whiten images of this size.
    """
    layer = _first_convolution(build_for_shapes(components[0]), model)
    if max(layer.weight.shape[2:]) > image_size:
        raise UsageError(
            f"--whiten needs images of at least {max(layer.weight.shape[2:])} pixels a side for "
            f"the first convolution of {model}: leave --whiten out"
        )
    return layer
