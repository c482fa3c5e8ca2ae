"""The small CNN of Abdulkarim et al., AJEST 5(1), 2026, doi 10.55145/ajest.2026.05.01.009.

Conv 32 3x3 same ReLU, MaxPool 2, Conv 64 3x3 same ReLU, MaxPool 2, Flatten, Dense 64 ReLU, Dense;
282,250 parameters for 10 classes and 32x32. Each ReLU of a convolution follows its pooling here,
which is the same function with the same gradients, of a quarter of the elements. The paper used
Keras, so weights start with Keras's defaults: Glorot uniform kernels, zero biases. The softmax
belongs to the loss.
"""

from collections import OrderedDict
from functools import partial

from torch import nn

from hvdtrain.models.component import IMAGE_CHANNELS, Component, check_image_size

SMALLEST_IMAGE = 4  # pixels: two poolings must leave at least one


def cnn(classes: int, image_size: int) -> list[Component]:
    """Return conv1, conv2, dense and head: images [n, 3, size, size] to logits [n, classes].

    Raises UsageError for images of less than 4 x 4 pixels.
    """
    check_image_size("cnn", image_size, SMALLEST_IMAGE)
    pooled = image_size // 4
    return [
        Component("conv1", partial(_convolution, IMAGE_CHANNELS, 32)),
        Component("conv2", partial(_convolution, 32, 64)),
        Component("dense", partial(_dense, 64 * pooled * pooled, 64)),
        Component("head", partial(_linear, 64, classes)),
    ]


def _convolution(in_channels: int, out_channels: int) -> nn.Module:
    layers = OrderedDict[str, nn.Module](
        conv=_as_keras(nn.Conv2d(in_channels, out_channels, kernel_size=3, padding="same")),
        pool=nn.MaxPool2d(2),
        relu=nn.ReLU(inplace=True),
    )
    return nn.Sequential(layers)


def _dense(in_features: int, out_features: int) -> nn.Module:
    # Flatten uses the order channel, row, column, whatever the memory format of the input.
    layers = OrderedDict[str, nn.Module](
        flatten=nn.Flatten(), linear=_linear(in_features, out_features), relu=nn.ReLU()
    )
    return nn.Sequential(layers)


def _linear(in_features: int, out_features: int) -> nn.Module:
    return _as_keras(nn.Linear(in_features, out_features))


def _as_keras(layer: nn.Conv2d | nn.Linear) -> nn.Module:
    nn.init.xavier_uniform_(layer.weight)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
