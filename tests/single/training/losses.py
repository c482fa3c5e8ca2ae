"""A regression of a user: its data, its model and its loss."""

from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from hvdtrain import Loss
from hvdtrain.models.component import Component


def save_arrays(path: Path, targets: np.ndarray | None = None) -> None:
    """Write images whose targets are the means of their channels."""
    random = np.random.default_rng(0)
    levels = random.integers(0, 200, (61, 1, 1, 3))
    images = (levels + random.integers(0, 50, (61, 8, 8, 3))).astype(np.uint8)
    means = (images.mean((1, 2)) / 255).astype(np.float32)
    np.savez(path, images=images, labels=means if targets is None else targets)


def model(classes: int, image_size: int) -> list[Component]:
    """Return a linear regression in two components."""
    flat = Component("flat", lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, 8)))
    return [flat, Component("head", partial(nn.Linear, 8, classes))]


def pixels(classes: int, image_size: int) -> list[Component]:
    """Return a model with a class for each pixel."""
    return [
        Component("stem", lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())),
        Component("head", partial(nn.Conv2d, 4, classes, 1)),
    ]


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error of each sample."""
    return (outputs - targets).square().mean(1)


def worst(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the largest error of each sample."""
    return (outputs - targets).abs().amax(1)


measured = Loss(squares, {"worst": worst})
