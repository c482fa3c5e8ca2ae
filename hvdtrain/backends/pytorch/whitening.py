"""Whitening of a model's first convolution from the patches of the training images."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Index
from hvdtrain.data.order import Rows
from hvdtrain.data.shards import open_split
from hvdtrain.errors import UsageError
from hvdtrain.models.component import Component, build_on_meta
from hvdtrain.training.feed import Normalisation
from hvdtrain.world import World

IMAGES = 5000  # whose patches are measured
EPSILON = 5e-4  # added to the variances, so that those near 0 are not divided by


@dataclass(frozen=True)
class Whitened:
    """Builds a component whose first convolution whitens, with weights that are not trained.

    Args:
        component: that is built.
        filters: [n, channels, height, width] on the CPU. The convolution uses as many of them as
            it has; its other filters, if it has more, keep their initial weights.
    """

    component: Component
    filters: Tensor

    def __call__(self) -> nn.Module:
        """Return a new module."""
        module = self.component.build()
        weight = _first_convolution(module).weight
        with torch.no_grad():
            used = min(len(self.filters), len(weight))
            weight[:used] = self.filters[:used].to(weight)
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
    module = build_on_meta(first)
    weight = _first_convolution(module, config.model).weight
    filters = None
    if world.rank == 0:
        with open_split(index, "train") as samples:
            # In a random order of the file, so that classes that lie together all count.
            chosen = np.random.default_rng(config.seed).permutation(rows)[:IMAGES]
            images = samples.gather(np.sort(chosen)).images
        filters = whitening_filters(images, normal, (weight.shape[2], weight.shape[3])).numpy()
    shared = torch.from_numpy(world.broadcast(filters))
    return [replace(first, build=Whitened(first, shared)), *others]


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
    mean, std = (np.asarray(values, np.float64) for values in normal)
    pixels = torch.from_numpy((images / 255 - mean) / std).permute(0, 3, 1, 2)
    height, width = kernel
    channels = pixels.shape[1]
    patches = pixels.unfold(2, height, 1).unfold(3, width, 1)
    flat = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, channels * height * width)
    variances, vectors = torch.linalg.eigh(torch.cov(flat.T))
    scaled = (vectors / torch.sqrt(variances + EPSILON)).T.flip(0)
    filters = scaled.reshape(-1, channels, height, width)
    return torch.cat([filters, -filters]).float()


def _first_convolution(module: nn.Module, model: str = "") -> nn.Conv2d:
    """Return the convolution that images enter.

    Raises:
        UsageError: if there is none.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d) and layer.groups == 1:
            return layer
    raise UsageError(
        f"--whiten needs a model whose first component has a convolution, and {model} has none: "
        "leave --whiten out"
    )
