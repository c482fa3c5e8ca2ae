"""Models of a user of Keras."""

import keras

from tests.single.training import moments


def small(classes: int, image_size: int) -> keras.Model:
    """A single hidden layer."""
    layers = keras.layers
    given = layers.Input((image_size, image_size, 3))
    hidden = layers.Dense(8, "relu", name="hidden")(layers.Flatten()(given))
    return keras.Model(given, layers.Dense(classes, name="head")(hidden))


def with_moments(classes: int, image_size: int) -> keras.Model:
    """As `small`; something happens to it (see `moments`)."""
    moments.here()
    return small(classes, image_size)
