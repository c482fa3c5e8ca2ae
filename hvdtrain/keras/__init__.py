"""Horovod on Keras 3: data parallelism for any Keras model, in three lines of its program.

    import hvdtrain.keras as distributed

    world = distributed.start()
    model.compile(distributed.optimizer(keras.optimizers.Adam(1e-3 * world.size)), ...)
    model.fit(..., callbacks=distributed.callbacks())

Horovod's own Keras layer runs under Keras 3 without an error, but averages nothing. With this
package the optimizer itself averages, where Keras 3 calls it, and different weights are detected.
"""

from hvdtrain.keras.callbacks import (
    ExactMetrics,
    LocalSteps,
    SameWeights,
    SaveOnFirstRank,
    WarmUp,
    callbacks,
    evaluate,
)
from hvdtrain.keras.dataset import Datasets, datasets
from hvdtrain.keras.optimizer import optimizer
from hvdtrain.keras.ranks import StopTogether, start

__all__ = [
    "Datasets",
    "ExactMetrics",
    "LocalSteps",
    "SameWeights",
    "SaveOnFirstRank",
    "StopTogether",
    "WarmUp",
    "callbacks",
    "datasets",
    "evaluate",
    "optimizer",
    "start",
]
