"""Convolutional networks: residual ones (He et al., CVPR 2016), and a small one.

Parameters of residual networks have torchvision's names and initialisation (He normal, fan out,
for convolutions). Images of up to 64 pixels get the 3x3 stem without pooling that is usual for
CIFAR, larger ones the 7x7 stem with pooling that is usual for ImageNet.

The small CNN is that of Abdulkarim et al., AJEST 5(1), 2026, doi 10.55145/ajest.2026.05.01.009:
Conv 32 3x3 same ReLU, MaxPool 2, Conv 64 3x3 same ReLU, MaxPool 2, Flatten, Dense 64 ReLU, Dense;
282,250 parameters for 10 classes and 32x32. Each ReLU of a convolution follows its pooling here,
which is the same function with the same gradients, of a quarter of the elements. The paper used
Keras, so weights start with Keras's defaults: Glorot uniform kernels, zero biases. The softmax
belongs to the loss.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from hvdtrain.models.component import Component, check_image_size, kaiming_normal
from hvdtrain.models.find import IMAGE_CHANNELS
from hvdtrain.models.shapes import DEPTHS, LARGEST_SMALL_IMAGE, STEM_CHANNELS


def resnet18(classes: int, image_size: int) -> list[Component]:
    """Return stem, layer1.0 ... layer4.1, head: images [n, 3, size, size] to logits [n, classes].

    11,173,962 parameters for 10 classes with the small stem, 11,689,512 for 1000 with the large.
    """
    return _resnet(BasicBlock, DEPTHS["resnet18"], classes, image_size)


def resnet50(classes: int, image_size: int) -> list[Component]:
    """Return stem, layer1.0 ... layer4.2, head: images [n, 3, size, size] to logits [n, classes].

    23,520,842 parameters for 10 classes with the small stem, 25,557,032 for 1000 with the large.
    """
    return _resnet(Bottleneck, DEPTHS["resnet50"], classes, image_size)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: [n, in_channels, h, w] to [n, channels, h', w'].

    h' and w' are h and w divided by `stride`, rounded up.
    """

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = _downsample(in_channels, channels, stride)
        _initialise_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        residual = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        residual = self.bn2(self.conv2(residual))
        return functional.relu(residual + self.downsample(x), inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut, to [n, 4 channels, h', w'].

    As in torchvision ("v1.5"), the 3x3 convolution has the stride, not the first 1x1 as in the
    paper.
    """

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = _downsample(in_channels, out_channels, stride)
        _initialise_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        residual = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        residual = functional.relu(self.bn2(self.conv2(residual)), inplace=True)
        residual = self.bn3(self.conv3(residual))
        return functional.relu(residual + self.downsample(x), inplace=True)


def _resnet(
    block: type[BasicBlock | Bottleneck], depths: Sequence[int], classes: int, image_size: int
) -> list[Component]:
    parts = [Component("stem", partial(_stem, image_size))]
    in_channels = STEM_CHANNELS
    for layer, depth in enumerate(depths):
        channels = STEM_CHANNELS * 2**layer
        for index in range(depth):
            stride = 2 if layer > 0 and index == 0 else 1
            build = partial(block, in_channels, channels, stride)
            parts.append(Component(f"layer{layer + 1}.{index}", build))
            in_channels = channels * block.expansion
    return [*parts, Component("head", partial(_head, in_channels, classes))]


def _stem(image_size: int) -> nn.Module:
    layers = OrderedDict[str, nn.Module]()
    if image_size <= LARGEST_SMALL_IMAGE:
        layers["conv1"] = nn.Conv2d(IMAGE_CHANNELS, STEM_CHANNELS, 3, padding=1, bias=False)
    else:
        layers["conv1"] = nn.Conv2d(IMAGE_CHANNELS, STEM_CHANNELS, 7, 2, padding=3, bias=False)
    layers["bn1"] = nn.BatchNorm2d(STEM_CHANNELS)
    layers["relu"] = nn.ReLU(inplace=True)
    if image_size > LARGEST_SMALL_IMAGE:
        layers["maxpool"] = nn.MaxPool2d(3, 2, padding=1)
    return _initialise_convolutions(nn.Sequential(layers))


def _head(in_channels: int, classes: int) -> nn.Module:
    layers = OrderedDict[str, nn.Module](
        avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(in_channels, classes)
    )
    return nn.Sequential(layers)


def _downsample(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Return the shortcut: a projection where the shape changes, else the identity."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
    )


def _initialise_convolutions(module: nn.Module) -> nn.Module:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            kaiming_normal(layer.weight, "fan_out")
    return module


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
