"""The network of Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv 2404.00498.

Conv 24 2x2 GELU, three blocks of two 3x3 convolutions (64, 256 and 256 channels) with pooling,
batch norm and GELU, max pooling, Dense without bias divided by 9; 1,972,768 parameters for 10
classes, 288 of them in the first convolution. It is meant for `--whiten`, which sets
these from the data. Each block's convolutions start as the identity of their first channels.
"""

from collections import OrderedDict
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from hvdtrain.models.component import IMAGE_CHANNELS, Component, check_image_size

CHANNELS = 64, 256, 256
KERNEL = 2
FILTERS = 2 * IMAGE_CHANNELS * KERNEL**2  # a whitening and its negative
SMALLEST_IMAGE = KERNEL - 1 + 2 ** len(CHANNELS)  # pixels: the poolings must leave one
SCALE = 1 / 9  # of the logits


def airbench(classes: int, image_size: int) -> list[Component]:
    """Return stem, block1 to block3 and head: images [n, 3, size, size] to logits [n, classes].

    Raises UsageError for images of less than 9 x 9 pixels.
    """
    check_image_size("airbench", image_size, SMALLEST_IMAGE)
    widths = FILTERS, *CHANNELS
    blocks = [
        Component(f"block{number + 1}", partial(_block, widths[number], widths[number + 1]))
        for number in range(len(CHANNELS))
    ]
    head = Component("head", partial(Head, widths[-1], classes))
    return [Component("stem", _stem), *blocks, head]


def _stem() -> nn.Module:
    layers = OrderedDict[str, nn.Module](
        conv=nn.Conv2d(IMAGE_CHANNELS, FILTERS, KERNEL, bias=False), gelu=nn.GELU()
    )
    return nn.Sequential(layers)


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

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        # Not AdaptiveMaxPool2d, whose backward on a GPU is not deterministic.
        logits: Tensor = self.fc(functional.max_pool2d(x, x.shape[2:]).flatten(1))
        return logits * SCALE
