"""Joins the ranks of the launcher, for a program that trains with Keras."""

import os
from typing import Any

from hvdtrain import failure, world
from hvdtrain.errors import UsageError
from hvdtrain.world import World


def start(threads: int | None = None, allreduce: str = "auto") -> World:
    """Join the ranks that the launcher started, or be a world of one; before any model is made.

    TensorFlow gets as many threads as the rank has and, on a machine with GPUs, the rank's own.
    From here on an exception on one rank ends the job on all of them.

    Args:
        threads: of this rank; default: its share of the cores.
        allreduce: "ring" asks the MPI library for its ring algorithm, "auto" lets it choose.

    Raises:
        UsageError: if MPI, Horovod or TensorFlow is missing, Keras computes with another
            framework, or TensorFlow has begun already.
    """
    here = world.start(allreduce, threads)
    if here.size > 1:
        failure.end_all_on_exception()
    tensorflow = _import_tensorflow()
    try:
        _use_own_threads_and_gpu(tensorflow, here)
    except RuntimeError as error:
        raise UsageError(f"hvdtrain.tf.start() comes before any model: {error}") from None
    if here.size > 1:
        # A rank that makes a step which the others do not make ends the job, and says which.
        os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", "60")
        os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "300")
        os.environ.setdefault("HOROVOD_LOG_LEVEL", "warning")
        world.start_horovod(0, framework="tensorflow")
    return here


def _import_tensorflow() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        import keras
        import tensorflow
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"TensorFlow cannot be loaded ({reason}): pip install tensorflow-cpu"
        ) from None
    if keras.config.backend() != "tensorflow":
        raise UsageError(
            f"Keras computes with {keras.config.backend()}: set KERAS_BACKEND=tensorflow"
        )
    return tensorflow


def _use_own_threads_and_gpu(tensorflow: Any, here: World) -> None:
    """Raises RuntimeError if TensorFlow has begun already."""
    config = tensorflow.config
    config.threading.set_intra_op_parallelism_threads(here.threads)
    gpus = config.list_physical_devices("GPU")
    if gpus:
        own = gpus[here.local_rank % len(gpus)]
        config.set_visible_devices(own, "GPU")
        config.experimental.set_memory_growth(own, True)
