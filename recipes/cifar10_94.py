"""The recipe of cifar10-94.yaml: network, whitening, augmentation, views, optimizer and rate.

All of it is of Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv 2404.00498. Copy
this file, change it, and name its functions in a file of your own beside it.
"""

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from hvdtrain import Component
from hvdtrain.data.augment import splitmix64

CHANNELS = 64, 256, 256
KERNEL = 2
FILTERS = 2 * 3 * KERNEL**2  # a whitening and its negative
SCALE = 1 / 9  # of the logits
EPSILON = 5e-4  # added to the variances of patches, so that those near 0 are not divided by

MOMENTUM = 0.85
DECAY = 0.0089  # per step and rate
NORM_FACTOR = 64  # of the rate, for shifts of batch norm
EVERY, SLOW_SHARE = 5, 0.77  # steps between two meetings with slow weights; their share at the end

EPOCHS, WARMUP_EPOCHS = 14, 3.2
STEP = 1024 / (EPOCHS * 50_000)  # share of the run
START, END = 0.2, 0.07  # factors of the rate


def network(classes: int) -> list[Component]:
    """Return stem, block1 to block3 and head: images [n, 3, size, size] to logits [n, classes].

    Conv 24 2x2 GELU, three blocks of two 3x3 convolutions with pooling, batch norm and GELU, max
    pooling, Dense without bias divided by 9; 1,972,768 parameters for 10 classes. Images have at
    least 9 x 9 pixels.
    """
    widths = FILTERS, *CHANNELS
    blocks = [
        Component(f"block{number + 1}", partial(_block, widths[number], widths[number + 1]))
        for number in range(len(CHANNELS))
    ]
    head = Component("head", partial(Head, widths[-1], classes))
    return [Component("stem", _stem, whitening), *blocks, head]


def _stem() -> nn.Module:
    layers = OrderedDict[str, nn.Module](
        conv=nn.Conv2d(3, FILTERS, KERNEL, bias=False).requires_grad_(False), gelu=nn.GELU()
    )
    return nn.Sequential(layers)


def whitening(images: Tensor) -> dict[str, Tensor]:
    """Return filters whose outputs on these images are uncorrelated and of variance 1.

    They are the eigenvectors of the covariance of the patches, largest variance first, divided by
    the deviation, and after all of them their negatives: an activation function that cuts off
    negative values would lose half of each (Page, "How to train your ResNet", 2019; section 3.2).

    Args:
        images: of the training set, normalised, [n, channels, height, width].
    """
    channels = images.shape[1]
    size = channels * KERNEL**2
    products, sums, count = torch.zeros(size, size).double(), torch.zeros(size).double(), 0
    for block in images.split(50):  # all patches at once would take gigabytes
        patches = block.double().unfold(2, KERNEL, 1).unfold(3, KERNEL, 1)
        flat = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, size)
        products += flat.T @ flat
        sums += flat.sum(0)
        count += len(flat)
    mean = sums / count
    variances, vectors = torch.linalg.eigh(products / count - torch.outer(mean, mean))
    scaled = (vectors / torch.sqrt(variances.clamp_min(0) + EPSILON)).T.flip(0)
    filters = scaled.reshape(-1, channels, KERNEL, KERNEL)
    return {"conv.weight": torch.cat([filters, -filters]).float()}


def _block(in_channels: int, channels: int) -> nn.Module:
    layers = OrderedDict[str, nn.Module](
        conv1=_convolution(in_channels, channels),
        pool=nn.MaxPool2d(2),
        norm1=_norm(channels),
        gelu1=nn.GELU(),
        conv2=_convolution(channels, channels),
        norm2=_norm(channels),
        gelu2=nn.GELU(),
    )
    return nn.Sequential(layers)


def _convolution(in_channels: int, out_channels: int) -> nn.Conv2d:
    """Return a convolution that starts as the identity of its first channels."""
    layer = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:in_channels])
    return layer


def _norm(channels: int) -> nn.BatchNorm2d:
    """Return a batch norm that only shifts: its scale stays 1."""
    layer = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer


class Head(nn.Module):
    """The largest value of each channel, and a linear layer with small logits."""

    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(in_channels, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [n, classes]."""
        # Not AdaptiveMaxPool2d, whose backward on a GPU is not deterministic.
        logits: Tensor = self.fc(functional.max_pool2d(x, x.shape[2:]).flatten(1))
        return logits * SCALE


def crop(images: NDArray[np.uint8], down: Any, right: Any, is_mirrored: Any) -> NDArray[np.uint8]:
    """Return images that are moved by pixels, with reflected borders, and some mirrored.

    Args:
        images: uint8 [n, height, width, channels].
        down, right, is_mirrored: of all images, or of each: [n].
    """
    count, height, width, _ = images.shape

    def reflected(places: Any, size: int) -> Any:
        places = np.abs(places)
        return np.where(places >= size, 2 * (size - 1) - places, places)

    mirrored = np.broadcast_to(is_mirrored, count)[:, None]
    across = np.where(mirrored, np.arange(width)[::-1], np.arange(width))
    rows = reflected(np.arange(height) - np.broadcast_to(down, count)[:, None], height)
    columns = reflected(across - np.broadcast_to(right, count)[:, None], width)
    each = np.arange(count)[:, None, None]
    moved: NDArray[np.uint8] = images[each, rows[:, :, None], columns[:, None, :]]
    return moved


class Moves:
    """Shifts by up to some pixels, and each image mirrored in every second epoch (section 3.6).

    Attributes:
        views: what an evaluation sees of each test image (section 3.5): half the weight for the
            image and its mirror image, half for both of them at two places.
    """

    views = tuple(
        (weight, partial(crop, down=shift, right=shift, is_mirrored=is_mirrored))
        for shift, weight in ((0, 0.25), (-1, 0.125), (1, 0.125))
        for is_mirrored in (False, True)
    )

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def __call__(
        self, images: NDArray[np.uint8], seeds: NDArray[np.uint64], epoch: int
    ) -> NDArray[np.uint8]:
        """Return the images uint8 [n, height, width, channels] as this epoch shows them."""
        bits = splitmix64(seeds ^ splitmix64(np.array([epoch], np.uint64)))
        places = np.uint64(2 * self.shift + 1)
        down, right = ((bits >> np.uint64(at)) % places for at in (0, 24))
        is_mirrored = (seeds >> np.uint64(63)).astype(bool) ^ (epoch % 2 == 1)
        return crop(
            images, down.astype(int) - self.shift, right.astype(int) - self.shift, is_mirrored
        )


augment = Moves(2)


class LookAhead(torch.optim.Optimizer):
    """Lets weights and slow weights become the same mean (Zhang et al., arXiv 1907.08610).

    They do after every EVERY steps, and after the last one. The slow weights' share in it grows
    with the cube of the progress (section 3.4). It comes before the optimizer in a class's bases.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights."""
        super().step()
        for group in self.param_groups:
            before, after = group["progress"]
            for value in group["params"]:
                state = self.state[value]
                if "slow" not in state:
                    state |= {"slow": value.detach().clone(), "steps": 0}
                state["steps"] += 1
                if state["steps"] > 1 and (state["steps"] % EVERY == 0 or after >= 1):
                    value.copy_(state["slow"].lerp_(value, 1 - SLOW_SHARE * before**3))


class Optimizer(LookAhead, torch.optim.SGD):
    """SGD with Nesterov momentum, weight decay apart from it, and lookahead."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights."""
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 1 - group["lr"] * group["decay"])
        super().step()


def optimizer(parameters: Mapping[str, nn.Parameter], lr: float) -> Optimizer:
    """Return the optimizer; shifts of batch norm have a rate of their own, and no decay."""
    norms = [value for name, value in parameters.items() if ".norm" in name]
    others = [value for name, value in parameters.items() if ".norm" not in name]
    groups = (
        {"params": others, "lr": lr, "decay": DECAY},
        {"params": norms, "lr": lr * NORM_FACTOR, "decay": 0.0},
    )
    filled = [group for group in groups if group["params"]]  # a stage may have one kind alone
    return Optimizer(filled, lr, MOMENTUM, nesterov=True, fused=True)


def rate(done: float) -> float:
    """Return the factor of the rate: up from START to 1, then down to END."""
    warmup = WARMUP_EPOCHS / EPOCHS
    if done < warmup:
        return START + (1 - START) * min(1.0, (done + STEP) / warmup)
    return 1 - (1 - END) * (done - warmup) / (1 - warmup)
