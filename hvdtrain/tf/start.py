"""Joins the ranks of the launcher, for a program that trains with Keras."""

import os

import keras
import tensorflow as tf

from hvdtrain import failure, world
from hvdtrain.errors import UsageError
from hvdtrain.world import World

HOROVOD = {
    # A step that some ranks do not make ends the job, after a warning that names them.
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "300",
    "HOROVOD_LOG_LEVEL": "warning",
    # Gradients are many tensors here, of one group: always the same ones travel together.
    "HOROVOD_FUSION_THRESHOLD": str(64 * 2**20),
}


def start(threads: int | None = None, allreduce: str = "auto") -> World:
    """Join the ranks that the launcher started, or be a world of one; before any model is made.

    TensorFlow gets as many threads as the rank has and, on a machine with GPUs, the rank's own.
    From here on an exception on one rank ends the job on all of them.

    Args:
        threads: of this rank; default: its share of the cores.
        allreduce: "ring" asks the MPI library for its ring algorithm, "auto" lets it choose.

    Raises:
        UsageError: if MPI or Horovod is missing, Keras computes with another framework, or
            TensorFlow has begun already.
    """
    check_backend()
    here = world.start(allreduce, threads)
    if here.size > 1:
        failure.end_all_on_exception()
    try:
        use_own_threads(here)
        use_gpus(here)
    except RuntimeError as error:
        raise UsageError(f"hvdtrain.tf.start() comes before any model: {error}") from None
    start_horovod(here)
    return here


def check_backend() -> None:
    """Raise UsageError where Keras computes with another framework."""
    if keras.config.backend() != "tensorflow":
        raise UsageError(
            f"Keras computes with {keras.config.backend()}: set KERAS_BACKEND=tensorflow"
        )


def start_horovod(here: World) -> None:
    """Start Horovod where there are ranks to talk to. Collective.

    Raises:
        UsageError: if it is missing.
    """
    if here.size > 1:
        for name, value in HOROVOD.items():
            os.environ.setdefault(name, value)
        world.start_horovod(0, framework="tensorflow")


def use_own_threads(here: World) -> None:
    """Give TensorFlow the threads of this rank; RuntimeError if it has begun already."""
    tf.config.threading.set_intra_op_parallelism_threads(here.threads)


def use_gpus(here: World, every: bool = False) -> int:
    """Show TensorFlow the GPU of this rank, or every one; the number of those that it sees.

    Raises:
        RuntimeError: if it has begun already.
    """
    gpus = tf.config.list_physical_devices("GPU")
    own = gpus if every or not gpus else [gpus[here.local_rank % len(gpus)]]
    tf.config.set_visible_devices(own, "GPU")
    for gpu in own:
        tf.config.experimental.set_memory_growth(gpu, True)
    return len(own)
