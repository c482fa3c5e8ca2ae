"""The small CNN of Abdulkarim et al. in Keras; hvdtrain.models.cnn is the same in PyTorch."""

from collections.abc import Mapping

import keras
import numpy as np


def cnn(classes: int, image_size: int, seed: int | None = None) -> keras.Model:
    """Images [n, size, size, 3], float, to logits [n, classes]; 282,250 parameters at 10 and 32.

    The softmax belongs to the loss (`from_logits=True`). Names of layers are those of the
    components in PyTorch. `seed` makes the weights; None takes Keras's own generator.
    """
    layers = keras.layers
    conv = {"kernel_size": 3, "padding": "same", "activation": "relu"}

    # The head computes in fp32 also where the layers before it compute in bf16.
    precise = "float64" if keras.config.dtype_policy().name == "float64" else "float32"

    def kernel(number: int) -> keras.initializers.Initializer:
        own = None if seed is None else seed + number
        return keras.initializers.GlorotUniform(seed=own)

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
    """The weights of the PyTorch CNN, by its names, as `set_weights` of the Keras one takes them.

    Kernels [out, in, row, column] become [row, column, in, out]; the dense layer takes pixels in
    the order row, column, channel, where PyTorch's takes channel, row, column.
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
