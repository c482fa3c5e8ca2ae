"""A network with the proportions of AlexNet at 32 pixels: 5 convolutions, 3 dense layers.

Nine tenths of the operations are in the convolutions and three quarters of the weights in the
dense layers: Krizhevsky ("One weird trick for parallelizing convolutional neural networks",
arXiv 1404.5997) divides the images among devices for the former, and the weights for the latter.
"""

from functools import partial
from itertools import pairwise

from torch import nn

from hvdtrain.models.component import Component

CHANNELS = (3, 32, 64, 128, 128, 128)
POOLED = (1, 2, 5)  # convolutions, counted from 1, before a pooling
WIDTH = 1024


def components(classes: int, image_size: int) -> list[Component]:
    """Return the components, in model order."""
    convolutions = [
        Component(f"conv{number}", partial(_convolution, inputs, outputs, number))
        for number, (inputs, outputs) in enumerate(pairwise(CHANNELS), 1)
    ]
    pixels = CHANNELS[-1] * (image_size // 2 ** len(POOLED)) ** 2
    return [
        *convolutions,
        Component(
            "dense1", lambda: nn.Sequential(nn.Flatten(), nn.Linear(pixels, WIDTH), nn.ReLU())
        ),
        Component("dense2", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())),
        Component("head", lambda: nn.Linear(WIDTH, classes)),
    ]


def _convolution(inputs: int, outputs: int, number: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if number in POOLED else []))
