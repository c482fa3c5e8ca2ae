"""Joins the ranks of the launcher, for a program that trains with Keras."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf

from hvdtrain import failure, world
from hvdtrain.errors import UsageError, one_line
from hvdtrain.world import World

HOROVOD = {
    # A step that some ranks do not make ends the job, after a warning that names them.
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "300",
    "HOROVOD_LOG_LEVEL": "warning",
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
    with before_any_model():
        use_own_threads(here)
        use_gpus([here.local_rank])
    start_horovod(here)
    return here


@contextmanager
def before_any_model() -> Iterator[None]:
    """Turn what TensorFlow refuses once it has begun into an error of one line."""
    try:
        yield
    except RuntimeError as error:
        raise UsageError(
            f"TensorFlow has begun already in this process ({one_line(error)}): this comes before "
            "any model"
        ) from None


def check_backend() -> None:
    """Raise UsageError where Keras computes with another framework."""
    if keras.config.backend() != "tensorflow":
        raise UsageError(
            f"Keras computes with {keras.config.backend()}: set KERAS_BACKEND=tensorflow"
        )


def start_horovod(here: World, parameter_bytes: int = 0) -> None:
    """Start Horovod where there are ranks to talk to. Collective.

    Raises:
        UsageError: if it is missing.
    """
    if here.size > 1:
        for name, value in HOROVOD.items():
            os.environ.setdefault(name, value)
        world.start_horovod(parameter_bytes, framework="tensorflow")


def use_own_threads(here: World) -> None:
    """Give TensorFlow the threads of this rank; RuntimeError if it has begun with others."""
    if tf.config.threading.get_intra_op_parallelism_threads() != here.threads:
        tf.config.threading.set_intra_op_parallelism_threads(here.threads)


def use_gpus(numbers: Iterable[int]) -> int:
    """Show TensorFlow these GPUs, modulo those that there are; how many it sees then.

    Raises:
        RuntimeError: if it has begun with others.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return 0
    own = [gpus[number] for number in sorted({number % len(gpus) for number in numbers})]
    tf.config.set_visible_devices(own, "GPU")
    for gpu in own:
        tf.config.experimental.set_memory_growth(gpu, True)
    return len(own)
