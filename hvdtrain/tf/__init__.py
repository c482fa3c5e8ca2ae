"""Horovod on Keras 3: data parallelism for any Keras model, in three lines of its program.

    import hvdtrain.tf as distributed

    world = distributed.start()
    model.compile(distributed.optimizer(keras.optimizers.Adam(1e-3 * world.size)), ...)
    model.fit(..., callbacks=distributed.callbacks())

Horovod's own Keras layer runs under Keras 3 without an error, but averages nothing. With this
package the optimizer itself averages, where Keras 3 calls it, and different weights are detected.
"""

from hvdtrain.tf.callbacks import SameWeights, SaveOnFirstRank, WarmUp, callbacks
from hvdtrain.tf.dataset import Datasets, datasets
from hvdtrain.tf.metrics import ExactMetrics, evaluate
from hvdtrain.tf.optimizer import optimizer
from hvdtrain.tf.start import start

__all__ = [
    "Datasets",
    "ExactMetrics",
    "SameWeights",
    "SaveOnFirstRank",
    "WarmUp",
    "callbacks",
    "datasets",
    "evaluate",
    "optimizer",
    "start",
]
