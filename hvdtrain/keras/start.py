"""Start of a rank in a program that trains with Keras."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf

from hvdtrain import world
from hvdtrain.errors import UsageError, one_line
from hvdtrain.health import failure
from hvdtrain.world import World

HOROVOD = {
    # If some ranks miss an operation, Horovod prints a warning that names them, then ends the job.
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "300",
    "HOROVOD_LOG_LEVEL": "warning",
}


def start(threads: int | None = None, allreduce: str = "auto") -> World:
    """Join the ranks that the launcher started, or be a world of one; call it before any model.

    TensorFlow gets the threads of this rank and, on a machine with GPUs, the rank's own GPU.
    Afterwards an exception on one rank ends the job on all ranks.

    Args:
        threads: of this rank; default: its share of the cores.
        allreduce: "ring" requests the ring algorithm of the MPI library, "auto" lets it choose.

    Raises:
        UsageError: if MPI or Horovod is missing, Keras uses another framework, or TensorFlow is
            already initialised.
    """
    check_backend()
    current = world.start(allreduce, threads)
    if current.size > 1:
        failure.end_all_on_exception()
    with before_any_model():
        use_own_threads(current)
        use_gpus([current.local_rank])
    start_horovod(current)
    return current


@contextmanager
def before_any_model() -> Iterator[None]:
    """Turn TensorFlow's error after its initialisation into an error of one line."""
    try:
        yield
    except RuntimeError as error:
        raise UsageError(
            f"TensorFlow is already initialised in this process ({one_line(error)}): call this "
            "before making any model"
        ) from None


def check_backend() -> None:
    """Raise UsageError if Keras uses another framework."""
    if keras.config.backend() != "tensorflow":
        raise UsageError(f"Keras uses {keras.config.backend()}: set KERAS_BACKEND=tensorflow")


def start_horovod(current: World, parameter_bytes: int = 0) -> None:
    """Start Horovod if there are several ranks. Collective.

    Raises:
        UsageError: if it is missing.
    """
    if current.size > 1:
        for name, value in HOROVOD.items():
            os.environ.setdefault(name, value)
        world.start_horovod(parameter_bytes, framework="tensorflow")


def use_own_threads(current: World) -> None:
    """Give TensorFlow the threads of this rank.

    Raises:
        RuntimeError: if it is already initialised with another number.
    """
    if tf.config.threading.get_intra_op_parallelism_threads() != current.threads:
        tf.config.threading.set_intra_op_parallelism_threads(current.threads)


def use_gpus(numbers: Iterable[int]) -> int:
    """Make these GPUs visible to TensorFlow, modulo the number of GPUs; return how many are.

    Raises:
        RuntimeError: if it is already initialised with others.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return 0
    visible = [gpus[number] for number in sorted({number % len(gpus) for number in numbers})]
    tf.config.set_visible_devices(visible, "GPU")
    for gpu in visible:
        tf.config.experimental.set_memory_growth(gpu, True)
    return len(visible)
