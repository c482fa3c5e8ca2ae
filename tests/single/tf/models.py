"""Models of a Keras user."""

import keras

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
