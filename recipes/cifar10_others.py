"""Augmentations and optimizers of the recipes for other networks, from parts of cifar10_94.py."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from cifar10_94 import LookAhead, Moves
from numpy.typing import NDArray
from torch import nn

from hvdtrain.data.augment import splitmix64

moves = Moves(4)
MEAN = np.array([125, 123, 114], np.uint8)  # of CIFAR's pixels


class MovesOnly(Moves):
    """Moves for a run that is evaluated with one view of each test image."""

    views = ()


moves_one_view = MovesOnly(4)


class SGD(LookAhead, torch.optim.SGD):
    """SGD with lookahead."""


class AdamW(LookAhead, torch.optim.AdamW):
    """AdamW with lookahead."""


def sgd(parameters: Mapping[str, nn.Parameter], lr: float) -> SGD:
    """Return the optimizer of cifar10-resnet18.yaml."""
    return SGD(_groups(parameters, 0.0005), lr, momentum=0.9, nesterov=True, fused=True)


def adamw(parameters: Mapping[str, nn.Parameter], lr: float) -> AdamW:
    """Return the optimizer of cifar10-cnn.yaml."""
    return AdamW(_groups(parameters, 0.01), lr, fused=True)


def sgd_of_all(parameters: Mapping[str, nn.Parameter], lr: float) -> torch.optim.SGD:
    """Return the optimizer of resnet50.yaml, which decays normalisations and biases too."""
    return torch.optim.SGD(
        parameters.values(), lr, momentum=0.9, nesterov=True, weight_decay=0.0005, fused=True
    )


def adamw_of_all(parameters: Mapping[str, nn.Parameter], lr: float) -> torch.optim.AdamW:
    """Return the optimizer of vit_b16.yaml, which decays normalisations and biases too."""
    return torch.optim.AdamW(parameters.values(), lr, weight_decay=0.05, fused=True)


def _groups(parameters: Mapping[str, nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Return the weights, and biases and normalisations, which do not decay."""
    weights = [value for value in parameters.values() if value.dim() > 1]
    others = [value for value in parameters.values() if value.dim() <= 1]
    groups = ({"params": weights, "weight_decay": decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def cutout(images: NDArray[np.uint8], seeds: NDArray[np.uint64], epoch: int) -> NDArray[np.uint8]:
    """Shift by up to 4 pixels, mirror half, and blank a square of 8 (arXiv 1708.04552)."""
    count, height, width, _ = images.shape
    bits = splitmix64(seeds ^ splitmix64(np.array([epoch], np.uint64)))
    down, right = ((bits >> np.uint64(at)) % np.uint64(9) for at in (0, 20))
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    rows = down.astype(int)[:, None] + np.arange(height)
    columns = right.astype(int)[:, None] + np.arange(width)
    is_mirrored = (bits >> np.uint64(63)).astype(bool)
    columns[is_mirrored] = columns[is_mirrored, ::-1]
    moved: NDArray[np.uint8] = padded[
        np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]
    ]
    # The centre may be any pixel, so that the square may lie partly outside.
    bits = splitmix64(bits)
    top = (bits % np.uint64(height)).astype(int)[:, None] - 4
    left = ((bits >> np.uint64(24)) % np.uint64(width)).astype(int)[:, None] - 4
    y, x = np.arange(height), np.arange(width)
    in_rows, in_columns = (y >= top) & (y < top + 8), (x >= left) & (x < left + 8)
    moved[in_rows[:, :, None] & in_columns[:, None, :]] = MEAN
    return moved
