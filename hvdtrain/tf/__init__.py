"""Horovod on Keras 3: data parallelism for any Keras model, in three lines of its program.

    import hvdtrain.tf as distributed

    here = distributed.start()
    model.compile(distributed.optimizer(keras.optimizers.Adam(1e-3 * here.size)), ...)
    model.fit(..., callbacks=distributed.callbacks())

Horovod's own Keras layer runs under Keras 3 without an error and averages nothing; here the
optimizer itself does, where Keras 3 calls it, and ranks whose weights differ are found out.
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
