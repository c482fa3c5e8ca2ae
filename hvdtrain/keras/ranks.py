"""The ranks of a Keras program: their start, and the exchange of values outside of the steps."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.engine.agreement import Agreement, check_digests
from hvdtrain.errors import UsageError, one_line
from hvdtrain.health import failure
from hvdtrain.host.process import wait_until
from hvdtrain.world import World

HOROVOD = {
    # If some ranks miss an operation, Horovod prints a warning that names them, then ends the job.
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "300",
    "HOROVOD_LOG_LEVEL": "warning",
}
PIECE_BYTES = 2**28  # of a broadcast: MPI sends less than 2 GiB at once
WHOLE = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}  # integer dtypes by their bytes


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
    if current.rank > 0:
        write_nothing()
    with before_any_model():
        use_own_threads(current)
        use_gpus([current.local_rank])
    start_horovod(current)
    return current


def write_nothing() -> None:
    """Let the callbacks of Keras that write files do nothing here, but restore as before."""
    kinds = keras.callbacks
    hooks = [(kind, name) for kind in (kinds.CSVLogger, kinds.TensorBoard) for name in vars(kind)]
    hooks = [(kind, name) for kind, name in hooks if name.startswith(("on_", "set_model"))]
    hooks += [(kind, "_save_model") for kind in (kinds.ModelCheckpoint, kinds.BackupAndRestore)]
    for kind, name in [*hooks, (kinds.BackupAndRestore, "on_train_end")]:
        setattr(kind, name, lambda *_, **__: None)


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


def gather(what: str, value: Any) -> list[Any]:
    """Return every rank's `value`. Collective.

    Args:
        what: the action that all ranks are in, such as "comparing weights".

    Raises:
        CheckFailed: if a rank is in another action.
    """
    return _agreement().gather(what, value)


@cache
def _agreement() -> Agreement:
    cure = "run the same steps and evaluations on all ranks, with the same callbacks"
    return Agreement(world.current(), cure)


def broadcast(variables: Sequence[keras.Variable]) -> None:
    """Give all ranks the values of rank 0. Collective."""
    current = world.current()
    if current.communicator is None:
        return
    kinds = [(tuple(variable.shape), variable.dtype) for variable in variables]
    if any(theirs != kinds for theirs in gather("sending weights", kinds)):
        raise UsageError("the ranks' models have different variables: use the same on all ranks")
    for variable in variables:
        value = np.array(variable.numpy(), order="C")
        content = value.reshape(-1).view(np.uint8)
        for start in range(0, content.size, PIECE_BYTES):
            current.communicator.Bcast(content[start : start + PIECE_BYTES])
        if current.rank > 0:
            variable.assign(value)


def is_float(variable: keras.Variable) -> bool:
    """Return whether a variable is floating-point, unlike counters and the seeds of dropout."""
    return bool(tf.as_dtype(variable.dtype).is_floating)


def average_statistics(model: keras.Model) -> None:
    """Give all ranks the mean of the non-trainable floating-point variables. Collective.

    Only variables that differ are sent: weights of frozen layers stay as they are.
    """
    current = world.current()
    if current.size == 1:
        return
    variables = [variable for variable in model.non_trainable_variables if is_float(variable)]
    digests = gather(
        "averaging statistics", [int(fingerprint([variable.value])) for variable in variables]
    )
    differing = [
        variable
        for variable, *values in zip(variables, *digests, strict=True)
        if len(set(values)) > 1
    ]
    everywhere = gather("averaging statistics", [variable.numpy() for variable in differing])
    for variable, *values in zip(differing, *everywhere, strict=True):
        variable.assign(np.mean(values, axis=0, dtype=np.float64).astype(values[0].dtype))


def check_same(variables: Sequence[keras.Variable]) -> None:
    """Compare all bits of these variables on all ranks. Collective.

    Raises:
        CheckFailed: on all ranks, if they differ, naming a variable and a rank.
    """
    digests: dict[str, int] = {}
    for number, variable in enumerate(variables):  # two may have one path
        name = f"{variable.path} (variable {number})"
        name = name if variable.path in digests else variable.path
        digests[name] = int(fingerprint([variable.value]))
    check_digests(
        gather("comparing weights", digests),
        ": load weights on all ranks or on none, and change none on one rank only",
    )


def fingerprint(values: Sequence[Any]) -> Any:
    """Return an int64 that depends on every bit of the values, but not on the summation order."""
    total = tf.constant(0, tf.int64)
    for number, value in enumerate(values, 1):
        bits = tf.convert_to_tensor(value)
        if bits.dtype.is_floating:
            bits = tf.bitcast(bits, WHOLE[bits.dtype.size])
        # Weighted by position, so that swapped values give another fingerprint.
        flat = tf.reshape(tf.cast(bits, tf.int64), [-1])
        places = tf.range(1, tf.size(flat, out_type=tf.int64) + 1, dtype=tf.int64)
        total += number * tf.reduce_sum(flat * places)
    return total


class StopTogether(keras.callbacks.Callback):
    """Stops all ranks together if callbacks of any rank set `model.stop_training`.

    Keras reads it after the last callback of a step and of an epoch. So this callback takes its
    place behind the user's callbacks: in the hooks of `History`, which Keras puts there. A step
    sends the value, and the next one reads what all ranks sent.
    """

    def __init__(self, period: int = 1) -> None:
        """Communicate after every `period` steps, and after each epoch."""
        super().__init__()
        self.period, self.wanted = period, False
        self.request: Any = None
        self.sent, self.received = np.zeros((2, 1), np.uint8)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Take the place behind the user's callbacks."""
        self.wanted, self.request = False, None
        if world.current().size > 1:
            history = self.model.history
            history.on_train_batch_end = self._after_step
            history.on_epoch_end = self._after_epoch
            # EarlyStopping may have restored weights. Files of rank 0 are complete afterwards.
            history.on_train_end = lambda logs=None: check_same(self.model.trainable_variables)

    def _after_step(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.wanted, self.model.stop_training = self.wanted or self.model.stop_training, False
        if (batch + 1) % self.period == 0:
            self.model.stop_training = self._answer()
            self.sent[0] = self.wanted
            communicator = world.current().communicator
            assert communicator is not None
            self.request = communicator.Iallreduce(self.sent, self.received, world.mpi().MAX)

    def _after_epoch(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        keras.callbacks.History.on_epoch_end(self.model.history, epoch, logs)
        self._answer()  # of the last step, which `wanted` includes
        wanted = self.wanted or self.model.stop_training
        self.model.stop_training = any(gather("ending an epoch", wanted))

    def _answer(self) -> bool:
        """Return whether a rank wanted to stop when this was last sent."""
        if self.request is None:
            return False
        wait_until(self.request.Test)
        self.request = None
        return bool(self.received[0])
