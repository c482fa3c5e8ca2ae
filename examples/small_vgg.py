"""A model of your own: a small VGG (Simonyan and Zisserman, ICLR 2015) as named components.

Run it from the folder above this one:

    hvdtrain train --model examples.small_vgg:build --data DEST

`build` receives the number of classes and the size of the square images, and returns the
components in order. A component takes one tensor and returns one. It builds its module only when
it is called, so that each rank builds only the components it needs, with the same weights.
"""

from functools import partial

from torch import nn

from hvdtrain.models.component import Component


def build(classes: int, image_size: int) -> list[Component]:
    """Return block0, block1, ..., head; as many blocks (at most 4) as the image can be halved."""
    parts: list[Component] = []
    in_channels, out_channels = 3, 32
    while image_size >= 4 and len(parts) < 4:
        # functools.partial keeps the values of this iteration; a lambda would see the last ones.
        parts.append(Component(f"block{len(parts)}", partial(block, in_channels, out_channels)))
        in_channels, out_channels = out_channels, out_channels * 2
        image_size //= 2
    return [*parts, Component("head", partial(head, in_channels, classes))]


def block(in_channels: int, out_channels: int) -> nn.Module:
    """Return a block from [n, in_channels, size, size] to [n, out_channels, size/2, size/2]."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def head(in_channels: int, classes: int) -> nn.Module:
    """Return a classifier from [n, in_channels, size, size] to logits [n, classes]."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, classes))
