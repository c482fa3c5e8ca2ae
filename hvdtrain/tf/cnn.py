"""The small CNN of Abdulkarim et al. in Keras; hvdtrain.models.cnn is the same in PyTorch."""

from collections.abc import Mapping

import keras
import numpy as np


def cnn(classes: int, image_size: int, seed: int | None = None) -> keras.Model:
    """Return the CNN, from float images [n, size, size, 3] to logits [n, classes].

    It has 282,250 parameters for 10 classes and images of 32x32. The softmax belongs to the loss
    (`from_logits=True`). Layers have the names of the components in PyTorch.

    Args:
        seed: for the weights; None uses Keras's own generator.
    """
    layers = keras.layers
    conv = {"kernel_size": 3, "padding": "same", "activation": "relu"}

    # The head computes in fp32 even if the layers before it compute in bf16.
    precise = "float64" if keras.config.dtype_policy().name == "float64" else "float32"

    def kernel(number: int) -> keras.initializers.Initializer:
        return keras.initializers.GlorotUniform(seed=None if seed is None else seed + number)

    return keras.Sequential(
        [
            layers.Input((image_size, image_size, 3)),
            layers.Conv2D(32, name="conv1", kernel_initializer=kernel(0), **conv),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, name="conv2", kernel_initializer=kernel(1), **conv),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(64, "relu", name="dense", kernel_initializer=kernel(2)),
            layers.Dense(classes, name="head", kernel_initializer=kernel(3), dtype=precise),
        ],
        name="cnn",
    )


def weights_from_torch(state: Mapping[str, np.ndarray], image_size: int) -> list[np.ndarray]:
    """Return the weights of the PyTorch CNN in the order of `set_weights` of the Keras one.

    Kernels [out, in, row, column] become [row, column, in, out]. The dense layer reads pixels in
    the order row, column, channel; that of PyTorch reads channel, row, column.

    Args:
        state: the weights by their names in PyTorch.
    """
    side = image_size // 4
    dense = state["dense.linear.weight"]
    by_pixel = dense.reshape(len(dense), -1, side, side).transpose(2, 3, 1, 0)
    return [
        state["conv1.conv.weight"].transpose(2, 3, 1, 0),
        state["conv1.conv.bias"],
        state["conv2.conv.weight"].transpose(2, 3, 1, 0),
        state["conv2.conv.bias"],
        by_pixel.reshape(-1, len(dense)),
        state["dense.linear.bias"],
        state["head.weight"].T,
        state["head.bias"],
    ]
