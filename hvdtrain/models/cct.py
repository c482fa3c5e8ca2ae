"""Compact convolutional transformers: Hassani et al., arXiv 2104.05704.

Convolutions make the tokens, which learn from few images, and a weighted mean of all tokens takes
the place of the class token. CCT-L/3x2 of the paper has L blocks and two 3x3 convolutions. The
blocks are those of `vit`, which normalise before attention and before the MLP; no dropout.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvdtrain.models.component import IMAGE_CHANNELS, Component, check_image_size, kaiming_normal
from hvdtrain.models.vit import EPSILON, Shape, blocks, linear

CHANNELS = 64  # of the first convolution
SMALLEST_IMAGE = 4  # pixels: two poolings must leave at least one token


def cct_2(classes: int, image_size: int) -> list[Component]:
    """Return tokens, block0.attention, block0.mlp, block1.attention, block1.mlp, head.

    Images [n, 3, size, size] to logits [n, classes]; between components tokens [n, tokens, 128],
    64 of them for 32x32. 284,491 parameters for 10 classes and 32x32. Raises UsageError for images
    of less than 4 x 4 pixels.
    """
    return _cct(Shape(width=128, depth=2, heads=2, hidden=128), classes, image_size)


def cct_6(classes: int, image_size: int) -> list[Component]:
    """Return a larger model of 6 blocks: components and arguments as in `cct_2`, tokens of 256.

    3,331,531 parameters for 10 classes and 32x32.
    """
    return _cct(Shape(width=256, depth=6, heads=4, hidden=512), classes, image_size)


class Tokens(nn.Module):
    """Images [n, 3, size, size] to tokens [n, tokens, width], with positions."""

    def __init__(self, image_size: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(IMAGE_CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(CHANNELS, width, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        side = (image_size + 3) // 4
        self.pos_embedding = nn.Parameter(torch.empty(1, side**2, width))
        for convolution in (self.conv1, self.conv2):
            kaiming_normal(convolution.weight)
        nn.init.trunc_normal_(self.pos_embedding, std=0.2)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        # ReLU after pooling is the same function, of a quarter of the elements.
        x = functional.relu(self.pool(self.conv1(x)))
        x = functional.relu(self.pool(self.conv2(x)))
        return x.flatten(2).transpose(1, 2) + self.pos_embedding


class Head(nn.Module):
    """Layer norm, a weighted mean of the tokens, linear: [n, tokens, width] to [n, classes]."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(width, eps=EPSILON)
        self.weigh = linear(width, 1)
        self.fc = linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        tokens = self.ln(x)
        weights = self.weigh(tokens).softmax(1)  # [n, tokens, 1]
        logits: Tensor = self.fc((weights * tokens).sum(1))
        return logits


def _cct(shape: Shape, classes: int, image_size: int) -> list[Component]:
    check_image_size("cct", image_size, SMALLEST_IMAGE)
    tokens = Component("tokens", partial(Tokens, image_size, shape.width))
    return [tokens, *blocks(shape), Component("head", partial(Head, shape.width, classes))]
