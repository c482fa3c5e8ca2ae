"""MirroredStrategy: one process, whose devices each take a part of the batch."""

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

    def train(self, images: np.ndarray, labels: np.ndarray, counts: Any, whole: Any) -> Done:
        """One step, on a contiguous part of the batch for each device."""
        done: Done = self._traced(*self._parts(images, labels, counts), whole)
        return done

    def trace(self, images: np.ndarray, labels: np.ndarray, counts: Any, whole: Any) -> None:
        """Trace a step on such a batch, without making it."""
        self._traced.get_concrete_function(*self._parts(images, labels, counts), whole)

    def _parts(self, images: np.ndarray, labels: np.ndarray, counts: Any) -> list[Any]:
        cuts = order.split(len(images), [1] * self.count)
        own: list[tuple[np.ndarray, np.ndarray, Any]] = []
        for start, stop in cuts:
            if start == stop:  # no layer takes no image
                own.append((images[:1], labels[:1], np.zeros_like(counts)))
            else:
                own.append((images[start:stop], labels[start:stop], counts))
        return [self._spread(values) for values in zip(*own, strict=True)]

    def _spread(self, values: tuple[Any, ...]) -> Any:
        def of(context: Any) -> Any:
            return tf.constant(values[context.replica_id_in_sync_group])

        return self.strategy.experimental_distribute_values_from_function(of)

    def _on_all(self, images: Any, labels: Any, counts: Any, whole: Any) -> Done:
        arguments = (images, labels, counts, whole)
        done: Done = self.strategy.run(self.steps.once, args=arguments)
        own = self.strategy.experimental_local_results
        norms = tf.stack(own(done.norm))
        return Done(
            tf.add_n(own(done.loss_sum)),
            tf.linalg.norm(norms),
            tf.reduce_any(tf.stack(own(done.is_bad))),
            tf.zeros((), tf.float64),
        )
