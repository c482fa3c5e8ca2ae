"""One side of keras.py: runs `fit` on the CIFAR-10 CNN; rank 0 prints images/s as JSON.

It is a separate file because a program in the same folder as keras.py would import that as
`keras`:

    python -m benchmarks.keras_fit --data DIR [--replicas N]
"""

import argparse
import json
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import hvdtrain.keras as distributed
from hvdtrain.backends.tensorflow.step import cnn


class Clock(keras.callbacks.Callback):
    """Records when each window of steps ends."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.marks = [time.perf_counter()]

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the time after each window; `batch` counts from 0."""
        if (batch + 1) % self.window == 0:
            self.marks.append(time.perf_counter())


def main() -> None:
    """Train for `--steps` steps and print the rate of the median window."""
    options = _options()
    job = distributed.start()
    scope: AbstractContextManager[object] = nullcontext()
    if options.replicas:
        cpu = tf.config.list_physical_devices("CPU")[0]
        parts = [tf.config.LogicalDeviceConfiguration()] * options.replicas
        tf.config.set_logical_device_configuration(cpu, parts)
        names = [f"CPU:{number}" for number in range(options.replicas)]
        scope = tf.distribute.MirroredStrategy(names).scope()
    data = distributed.datasets(options.data, options.images)
    with scope:
        model = cnn(data.classes, data.image_size, seed=0)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(distributed.optimizer(keras.optimizers.Adam(0.001)), loss)
    clock = Clock(options.window)
    callbacks = [clock, *(distributed.callbacks() if job.size > 1 else [])]
    steps = {"steps_per_epoch": options.steps, "shuffle": False}
    model.fit(data.train, **steps, verbose=0, callbacks=callbacks)
    seconds = [later - sooner for sooner, later in pairwise(clock.marks)]
    if job.rank == 0:
        # The first windows contain the tracing of functions.
        rate = options.images * options.window / statistics.median(seconds[2:])
        print(json.dumps({"images_per_second": rate}), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="packed CIFAR-10")
    parser.add_argument("--images", type=int, default=64, help="images per step over all ranks")
    parser.add_argument(
        "--replicas", type=int, default=0, help="of MirroredStrategy; 0: without it"
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--window", type=int, default=20, help="steps that are timed as one")
    return parser.parse_args()


if __name__ == "__main__":
    main()
