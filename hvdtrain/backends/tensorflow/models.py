"""The built-in models in Keras 3, and their weights from and to PyTorch.

They are the architectures of `hvdtrain.models`, made of Keras's layers, whose names are those of
PyTorch's modules: `layer1.0.conv1` here is `layer1.0.conv1` there. With the same weights they have
the same outputs and gradients. Weights start from the same distributions, not from the same
numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from hvdtrain.models.shapes import (
    DEPTHS,
    EPSILON,
    LARGEST_SMALL_IMAGE,
    STEM_CHANNELS,
    VITS,
    Shape,
    component_seed,
    patch_size_of,
)

Arrays = Mapping[str, np.ndarray]
NORM = {"epsilon": 1e-5, "momentum": 0.9}  # PyTorch's, whose momentum is the part of the new value


@dataclass(frozen=True)
class Maker:
    """Makes layers with the names and initial weights that the models have in PyTorch.

    Attributes:
        seed: of the weights; None for Keras's own generator.
        precise: dtype of the head, which computes in fp32 even if the other layers do not.
    """

    seed: int | None
    precise: str

    def drawn(self, name: str, kind: Callable[..., Any], **settings: Any) -> Any:
        """Return an initializer for a weight."""
        seed = None if self.seed is None else component_seed(self.seed, name) % 2**31
        return kind(seed=seed, **settings)

    def conv(
        self, x: Any, name: str, channels: int, kernel: int, stride: int = 1, **settings: Any
    ) -> Any:
        """Return a convolution padded as in PyTorch; with a stride, "same" pads one side only."""
        if stride > 1 and kernel > 1:
            x = layers.ZeroPadding2D(kernel // 2)(x)
        weights = self.drawn(
            name,
            keras.initializers.VarianceScaling,
            scale=2.0,
            mode="fan_out",
            distribution="untruncated_normal",
        )
        padding = "same" if stride == 1 else "valid"
        settings = {"use_bias": False, "kernel_initializer": weights} | settings
        return layers.Conv2D(channels, kernel, stride, padding, name=name, **settings)(x)

    def bound(self, name: str, inputs: int) -> Any:
        """Return the initializer of PyTorch's linear layers: uniform, up to 1 / sqrt(inputs)."""
        limit = inputs**-0.5
        kind = keras.initializers.RandomUniform
        return self.drawn(name, kind, minval=-limit, maxval=limit)

    def normal(self, name: str, deviation: float = 0.02) -> Any:
        """Return the initializer of a vision transformer."""
        return self.drawn(name, keras.initializers.TruncatedNormal, stddev=deviation)

    def linear(self, x: Any, name: str, outputs: int, **settings: Any) -> Any:
        """Return a linear layer of a vision transformer."""
        return layers.Dense(outputs, name=name, kernel_initializer=self.normal(name), **settings)(
            x
        )


def make(name: str, classes: int, image_size: int, patch_size: int | None, seed: int) -> Any:
    """Return a built-in model, from float images [n, size, size, 3] to logits [n, classes]."""
    policy = keras.config.dtype_policy().name
    maker = Maker(seed, "float64" if policy == "float64" else "float32")
    images = layers.Input((image_size, image_size, 3))
    if name in DEPTHS:
        logits = _resnet(maker, images, image_size, name == "resnet50", DEPTHS[name], classes)
    else:
        patch = patch_size_of(image_size, patch_size)
        logits = _vit(maker, images, VITS[name], patch, classes)
    return keras.Model(images, logits, name=name)


NAMES = (*DEPTHS, *VITS)


def _resnet(
    maker: Maker, x: Any, size: int, bottleneck: bool, depths: Sequence[int], classes: int
) -> Any:
    is_small = size <= LARGEST_SMALL_IMAGE
    x = maker.conv(x, "stem.conv1", STEM_CHANNELS, *((3,) if is_small else (7, 2)))
    x = layers.ReLU()(layers.BatchNormalization(name="stem.bn1", **NORM)(x))
    if not is_small:  # zeros are as good as PyTorch's minus infinity: no value is below
        x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))
    for number, depth in enumerate(depths):
        channels = STEM_CHANNELS * 2**number
        for index in range(depth):
            stride = 2 if number > 0 and index == 0 else 1
            x = _block(maker, x, f"layer{number + 1}.{index}", channels, stride, bottleneck)
    x = layers.GlobalAveragePooling2D(dtype=maker.precise)(x)
    inputs = x.shape[-1]
    return layers.Dense(
        classes,
        name="head.fc",
        kernel_initializer=maker.bound("head.fc", inputs),
        bias_initializer=maker.bound("head.fc.bias", inputs),
        dtype=maker.precise,
    )(x)


def _block(maker: Maker, x: Any, name: str, channels: int, stride: int, bottleneck: bool) -> Any:
    outputs = channels * (4 if bottleneck else 1)
    shapes = ((1, 1), (3, stride), (1, 1)) if bottleneck else ((3, stride), (3, 1))
    inner = x
    for number, (kernel, step) in enumerate(shapes, 1):
        is_last = number == len(shapes)
        width = outputs if is_last else channels
        inner = maker.conv(inner, f"{name}.conv{number}", width, kernel, step)
        inner = layers.BatchNormalization(name=f"{name}.bn{number}", **NORM)(inner)
        inner = inner if is_last else layers.ReLU()(inner)
    if stride > 1 or x.shape[-1] != outputs:
        x = maker.conv(x, f"{name}.downsample.0", outputs, 1, stride)
        x = layers.BatchNormalization(name=f"{name}.downsample.1", **NORM)(x)
    return layers.ReLU()(layers.Add()([inner, x]))


@keras.saving.register_keras_serializable("hvdtrain")
class Positions(layers.Layer):
    """Puts a class token before [n, patches, width] and adds positions, as no layer of Keras."""

    def __init__(self, initializer: Any = "zeros", **settings: Any) -> None:
        super().__init__(**settings)
        self.initializer = keras.initializers.get(initializer)

    def build(self, shape: Any) -> None:
        """Make the token and the positions."""
        _, patches, width = shape
        self.class_token = self.add_weight(
            shape=(1, 1, width), initializer=self.initializer, name="class_token"
        )
        self.pos_embedding = self.add_weight(
            shape=(1, 1 + patches, width), initializer=self.initializer, name="pos_embedding"
        )

    def call(self, patches: Any) -> Any:
        """Return tokens [n, 1 + patches, width]."""
        width = patches.shape[-1]
        token = ops.broadcast_to(
            ops.cast(self.class_token, patches.dtype), (ops.shape(patches)[0], 1, width)
        )
        positions = ops.cast(self.pos_embedding, patches.dtype)
        return ops.concatenate([token, patches], axis=1) + positions

    def get_config(self) -> dict[str, Any]:
        """Return what makes the layer again."""
        made = {"initializer": keras.initializers.serialize(self.initializer)}
        config: dict[str, Any] = super().get_config() | made
        return config


def _vit(maker: Maker, images: Any, shape: Shape, patch: int, classes: int) -> Any:
    name, inputs = "embed.conv_proj", 3 * patch**2
    x = layers.Conv2D(
        shape.width,
        patch,
        patch,
        name=name,
        kernel_initializer=maker.bound(name, inputs),
        bias_initializer=maker.bound(f"{name}.bias", inputs),
    )(images)
    x = layers.Reshape((-1, shape.width))(x)
    x = Positions(maker.normal("embed"), name="embed")(x)
    for number in range(shape.depth):
        name = f"block{number}.attention"
        inner = layers.LayerNormalization(epsilon=EPSILON, name=f"{name}.ln_1")(x)
        inner = layers.MultiHeadAttention(
            shape.heads,
            shape.width // shape.heads,
            name=name,
            kernel_initializer=maker.normal(name),
        )(inner, inner)
        x = layers.Add()([x, inner])
        name = f"block{number}.mlp"
        inner = layers.LayerNormalization(epsilon=EPSILON, name=f"{name}.ln_2")(x)
        inner = maker.linear(inner, f"{name}.linear_1", shape.hidden, activation="gelu")
        x = layers.Add()([x, maker.linear(inner, f"{name}.linear_2", shape.width)])
    x = layers.LayerNormalization(epsilon=EPSILON, name="head.ln", dtype=maker.precise)(x[:, 0])
    return maker.linear(x, "head.fc", classes, dtype=maker.precise)


@dataclass(frozen=True)
class Pair:
    """A variable here, and the tensor or the part of one that it is in PyTorch.

    Attributes:
        name: of the tensor in PyTorch.
        there: returns the tensor of a variable's value. back: the other way round.
        part: of several variables that make one tensor: (number, of how many).
    """

    variable: Any
    name: str
    there: Callable[[np.ndarray], np.ndarray]
    back: Callable[[np.ndarray], np.ndarray]
    part: tuple[int, int] = (0, 1)


def _same(value: np.ndarray) -> np.ndarray:
    return value


def _pairs(model: Any) -> Iterator[Pair]:
    """Yield the variables of a built-in model with their tensors in PyTorch.

    Raises:
        ValueError: for a layer that no built-in model has.
    """
    for layer in model.layers:
        name, kind = layer.name, type(layer).__name__
        weights = {weight.path.rpartition("/")[2]: weight for weight in layer.weights}
        if kind == "Conv2D":
            of = f"{name}.conv" if name in ("conv1", "conv2") else name
            yield Pair(
                weights["kernel"],
                f"{of}.weight",
                lambda value: value.transpose(3, 2, 0, 1),
                lambda value: value.transpose(2, 3, 1, 0),
            )
        elif kind == "Dense":
            of = "dense.linear" if name == "dense" else name
            channels = 64 if name == "dense" else 0  # those that the CNN flattens
            yield Pair(weights["kernel"], f"{of}.weight", *_linear(channels))
        elif kind == "MultiHeadAttention":
            yield from _attention(layer)
            continue
        elif kind == "BatchNormalization":
            of = name
            yield Pair(weights["gamma"], f"{name}.weight", _same, _same)
            yield Pair(weights["beta"], f"{name}.bias", _same, _same)
            yield Pair(weights["moving_mean"], f"{name}.running_mean", _same, _same)
            yield Pair(weights["moving_variance"], f"{name}.running_var", _same, _same)
        elif kind == "LayerNormalization":
            of = name
            yield Pair(weights["gamma"], f"{name}.weight", _same, _same)
            yield Pair(weights["beta"], f"{name}.bias", _same, _same)
        elif kind == "Positions":
            yield Pair(layer.class_token, f"{name}.class_token", _same, _same)
            yield Pair(layer.pos_embedding, f"{name}.pos_embedding", _same, _same)
        elif layer.weights:
            raise ValueError(f"layer {name} is a {kind}, which no built-in model has")
        if "bias" in weights:
            yield Pair(weights["bias"], f"{of}.bias", _same, _same)


def _linear(channels: int) -> tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]:
    """Return the two ways of a kernel; `channels` are last in what was flattened here."""

    def there(value: np.ndarray) -> np.ndarray:
        if not channels:
            return value.T
        side = round((len(value) / channels) ** 0.5)
        image = value.reshape(side, side, channels, -1)
        return image.transpose(3, 2, 0, 1).reshape(value.shape[1], -1)

    def back(value: np.ndarray) -> np.ndarray:
        if not channels:
            return value.T
        side = round((value.shape[1] / channels) ** 0.5)
        image = value.reshape(-1, channels, side, side)
        return image.transpose(2, 3, 1, 0).reshape(value.shape[1], -1)

    return there, back


def _attention(layer: Any) -> Iterator[Pair]:
    """Yield the pairs of an attention: one projection of PyTorch is three here, by head."""
    heads, name = layer.num_heads, layer.name
    for number, dense in enumerate((layer.query_dense, layer.key_dense, layer.value_dense)):
        yield Pair(
            dense.kernel,
            f"{name}.in_proj.weight",
            lambda value: value.reshape(len(value), -1).T,
            lambda value: value.T.reshape(value.shape[1], heads, -1),
            (number, 3),
        )
        yield Pair(
            dense.bias,
            f"{name}.in_proj.bias",
            lambda value: value.reshape(-1),
            lambda value: value.reshape(heads, -1),
            (number, 3),
        )
    yield Pair(
        layer.output_dense.kernel,
        f"{name}.out_proj.weight",
        lambda value: value.reshape(-1, value.shape[-1]).T,
        lambda value: value.T.reshape(heads, -1, len(value)),
    )
    yield Pair(layer.output_dense.bias, f"{name}.out_proj.bias", _same, _same)


def to_torch(model: Any, values: Mapping[int, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """Return the weights of a built-in model by their names in PyTorch.

    Args:
        values: to convert in the place of the weights, such as gradients, by the id of their
            variable; variables without one are left out.
    """
    parts: dict[str, list[np.ndarray]] = {}
    for pair in _pairs(model):
        if values is None:
            value = np.asarray(pair.variable)
        elif id(pair.variable) in values:
            value = values[id(pair.variable)]
        else:
            continue
        parts.setdefault(pair.name, []).append(pair.there(value))
    return {name: np.ascontiguousarray(np.concatenate(of)) for name, of in parts.items()}


def from_torch(model: Any, tensors: Arrays) -> None:
    """Give a built-in model the weights that it has in PyTorch, by their names there.

    Raises:
        KeyError: if one is missing.
    """
    for pair in _pairs(model):
        number, count = pair.part
        value = np.split(tensors[pair.name], count)[number] if count > 1 else tensors[pair.name]
        pair.variable.assign(pair.back(value))
