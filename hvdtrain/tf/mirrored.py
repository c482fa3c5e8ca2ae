"""MirroredStrategy: one process, whose devices each take a part of the batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data import order
from hvdtrain.errors import UsageError
from hvdtrain.tf.step import Done, Steps
from hvdtrain.world import World


def make_strategy(plan: str, devices: int, gpus: int, here: World) -> tf.distribute.Strategy:
    """Mirrors over GPUs, or over logical CPU devices where there are none.

    Args:
        plan: what the user asked for.
        devices: how many; 0 for all GPUs, or as many CPU devices as this rank has threads.
        gpus: that TensorFlow sees.

    Raises:
        UsageError: if there are fewer GPUs.
        RuntimeError: if TensorFlow has begun already.
    """
    if gpus:
        if devices > gpus:
            raise UsageError(f"--plan {plan} wants {devices} GPUs, and TensorFlow sees {gpus}")
        return tf.distribute.MirroredStrategy([f"GPU:{i}" for i in range(devices or gpus)])
    count = devices or here.threads
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
        """Trace anew what was traced."""
        self._traced = tf.function(self._on_all)

    def train(self, images: np.ndarray, labels: np.ndarray, whole: Any) -> Done:
        """One step, on a contiguous part of the batch for each device."""
        done: Done = self._traced(*self._parts(images, labels), whole)
        return done

    def trace(self, images: np.ndarray, labels: np.ndarray, whole: Any) -> None:
        """Trace a step on such a batch, without making it."""
        self._traced.get_concrete_function(*self._parts(images, labels), whole)

    def _parts(self, *arrays: np.ndarray) -> list[Any]:
        cuts = order.split(len(arrays[0]), [1] * self.count)
        return [self._spread([each[start:stop] for start, stop in cuts]) for each in arrays]

    def _spread(self, values: Sequence[np.ndarray]) -> Any:
        def of(context: Any) -> Any:
            return tf.constant(values[context.replica_id_in_sync_group])

        return self.strategy.experimental_distribute_values_from_function(of)

    def _on_all(self, images: Any, labels: Any, whole: Any) -> Done:
        done: Done = self.strategy.run(self.steps.once, args=(images, labels, whole))
        own = self.strategy.experimental_local_results
        return Done(
            tf.add_n(own(done.loss_sum)),
            tf.constant(np.nan),  # --gradient-limit, which asks for it, does not go with mirrors
            tf.reduce_any(tf.stack(own(done.is_bad))),
            tf.zeros((), tf.float64),
        )
