"""Models of a Keras user, and the weights of the CNN in the order of Keras."""

from collections.abc import Mapping

import keras
import numpy as np

from tests.single.training import moments


def small(classes: int, image_size: int) -> keras.Model:
    """Return a model with a single hidden layer."""
    layers = keras.layers
    inputs = layers.Input((image_size, image_size, 3))
    hidden = layers.Dense(8, "relu", name="hidden")(layers.Flatten()(inputs))
    return keras.Model(inputs, layers.Dense(classes, name="head")(hidden))


def with_moments(classes: int, image_size: int) -> keras.Model:
    """Return `small`; a fault is injected into it (see `moments`)."""
    moments.watch_rank()
    return small(classes, image_size)


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
