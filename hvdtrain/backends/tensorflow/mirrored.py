"""MirroredStrategy: one process that splits each batch among several devices."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow.step import Done, Steps
from hvdtrain.data import order
from hvdtrain.errors import UsageError
from hvdtrain.world import World


def make_strategy(plan: str, devices: int, gpus: int, world: World) -> tf.distribute.Strategy:
    """Return a strategy for GPUs, or for logical CPU devices if there are none.

    Args:
        plan: as the user typed it.
        devices: their number; 0 for all GPUs, or for one CPU device per thread of this rank.
        gpus: number of GPUs that TensorFlow sees.

    Raises:
        UsageError: if there are fewer GPUs.
        RuntimeError: if TensorFlow is already initialised.
    """
    if gpus:
        if devices > gpus:
            raise UsageError(
                f"--plan {plan} needs {devices} GPUs, but TensorFlow sees {gpus}: use fewer"
            )
        return tf.distribute.MirroredStrategy([f"GPU:{i}" for i in range(devices or gpus)])
    count = devices or world.threads
    processor = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(processor, parts)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])


class MirroredSteps:
    """The steps of `Steps` on the devices of a strategy."""

    def __init__(self, steps: Steps, strategy: tf.distribute.Strategy) -> None:
        self.steps, self.strategy = steps, strategy
        self.count = int(strategy.num_replicas_in_sync)
        self.forget()

    def forget(self) -> None:
        """Discard the traced function, so that the next step traces it again."""
        self._traced = tf.function(self._on_all)

    def train(self, images: np.ndarray, labels: np.ndarray, whole: Any) -> Done:
        """Do one step; each device trains on a contiguous part of the batch."""
        done: Done = self._traced(*self._parts(images, labels), whole)
        return done

    def trace(self, images: np.ndarray, labels: np.ndarray, whole: Any) -> None:
        """Trace a step on such a batch, without running it."""
        self._traced.get_concrete_function(*self._parts(images, labels), whole)

    def _parts(self, *arrays: np.ndarray) -> list[Any]:
        cuts = order.split(len(arrays[0]), [1] * self.count)
        return [self._spread([array[start:stop] for start, stop in cuts]) for array in arrays]

    def _spread(self, values: Sequence[np.ndarray]) -> Any:
        def of(context: Any) -> Any:
            return tf.constant(values[context.replica_id_in_sync_group])

        return self.strategy.experimental_distribute_values_from_function(of)

    def _on_all(self, images: Any, labels: Any, whole: Any) -> Done:
        done: Done = self.strategy.run(self.steps.once, args=(images, labels, whole))
        local_results = self.strategy.experimental_local_results
        return Done(
            tf.add_n(local_results(done.loss_sum)),
            tf.constant(np.nan),  # only --gradient-limit needs it, which excludes mirrors
            tf.reduce_any(tf.stack(local_results(done.is_bad))),
            tf.zeros((), tf.float64),
        )
