"""Makes two fits one after the other in a process, as a script of plain Keras does.

    python -m hvdtrain.study.fits DATA SEED KIND KIND

It is paper A's experiment. KIND is single, or mirrored: `tf.distribute.MirroredStrategy()` without
arguments, as in the paper, which takes all CPUs of a machine for one device. Prints the seconds of
each epoch of both fits, its evaluation included, as JSON.
"""

import json
import os
import sys
import time
from contextlib import nullcontext

import numpy as np

from hvdtrain.data.index import read_index
from hvdtrain.data.shards import open_split

EPOCHS = 2  # the first one also traces the step; all others are as long as the second one
TRAINED = 0.8  # of the training images


def seconds_of(data: str, seed: int, kinds: list[str]) -> list[list[float]]:
    """Return the seconds of each epoch, by fit."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras
    import tensorflow as tf

    index = read_index(data)
    arrays = []
    for split, part in (("train", TRAINED), ("test", 1.0)):
        with open_split(index, split) as samples:
            whole = samples.gather(np.arange(int(part * len(samples))))
        pixels = whole.images.astype(np.float32) / 255
        arrays.append((pixels, keras.utils.to_categorical(whole.labels, index.classes)))
    fits = []
    for kind in kinds:
        keras.utils.set_random_seed(seed)
        scope = tf.distribute.MirroredStrategy().scope() if kind == "mirrored" else nullcontext()
        with scope:
            layers = keras.layers
            model = keras.Sequential(
                [
                    keras.Input(index.image_shape),
                    layers.Conv2D(32, 3, padding="same", activation="relu"),
                    layers.MaxPooling2D(2),
                    layers.Conv2D(64, 3, padding="same", activation="relu"),
                    layers.MaxPooling2D(2),
                    layers.Flatten(),
                    layers.Dense(64, activation="relu"),
                    layers.Dense(index.classes, activation="softmax"),
                ]
            )
            optimizer = keras.optimizers.Adam(0.001)
            model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"])
        ends = [time.perf_counter()]
        clock = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_, ends=ends: ends.append(time.perf_counter())
        )
        model.fit(
            *arrays[0],
            batch_size=64,
            epochs=EPOCHS,
            validation_data=arrays[1],
            verbose=0,
            callbacks=[clock],
        )
        fits.append(np.diff(ends).tolist())
    return fits


if __name__ == "__main__":
    print(json.dumps(seconds_of(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
