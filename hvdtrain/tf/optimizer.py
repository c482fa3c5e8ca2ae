"""An optimizer of Keras 3 that averages gradients over all ranks before it applies them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import keras
import tensorflow as tf

from hvdtrain import world
from hvdtrain.errors import UsageError

Optimizer = TypeVar("Optimizer", bound=keras.optimizers.Optimizer)

if TYPE_CHECKING:
    _Mixed = Any
else:
    _Mixed = object  # the class that `_Averaging` is mixed into has what it calls

CHECK_EVERY = 100  # steps from one comparison of the ranks' weights to the next
WHOLE = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}  # numbers by their bytes


def optimizer(own: Optimizer) -> Optimizer:
    """Let `own` average the gradients over all ranks, in one grouped all-reduce a step.

    The optimizer is changed, not copied: it keeps its variables and settings, and is returned for
    convenience. When it is built the model's trainable variables take rank 0's values, so that
    all ranks begin alike. Every 100 steps, and after the first, the weights
    of all ranks are compared inside the step. A rank's loss counts as the mean over the samples
    that the rank has: give all ranks as many, or weights (`hvdtrain.tf.dataset` does).

    With `gradient_accumulation_steps`, ranks communicate when the weights change, not before.
    In a world of one the optimizer is returned as it was.

    Raises:
        UsageError: if `own` is no optimizer of Keras 3.
    """
    if not isinstance(own, keras.optimizers.Optimizer):
        raise UsageError(
            f"a {type(own).__name__} is no optimizer of Keras 3: "
            "give one of keras.optimizers, with the settings of yours"
        )
    if world.current().size == 1 or is_distributed(own):
        return own
    kind = type(own)
    # Saved models name the class: they load where there is no hvdtrain, as the class it was.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own.__class__ = type(kind.__name__, (_Averaging, kind), names)
    return own


def is_distributed(own: object) -> bool:
    """Whether this optimizer averages over the ranks."""
    return isinstance(own, _Averaging)


class _Averaging(_Mixed):
    """What an optimizer does before its own class does: Keras 3 calls nothing but `apply`."""

    def build(self, variables: Sequence[keras.Variable]) -> None:
        # Its own variables begin alike on all ranks, and in a traced step do not exist yet.
        super().build(variables)
        with tf.init_scope():
            broadcast([each for each in variables if each.value.is_initialized()])

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        if not self.gradient_accumulation_steps:
            grads = average(grads, self.name)
        super().apply(grads, trainable_variables)
        compare(trainable_variables or self._trainable_variables, self.iterations, self.name)

    def _clip_gradients(self, grads: Any) -> Any:
        # With accumulation this is called once an update, with what was accumulated.
        if self.gradient_accumulation_steps:
            grads = average(list(grads), self.name)
        return super()._clip_gradients(grads)


def average(gradients: list[Any], name: str) -> list[Any]:
    """The mean over all ranks of each gradient; None where there is none."""
    horovod = world.horovod()
    dense = [tf.convert_to_tensor(each) for each in gradients if each is not None]
    if not dense:
        return gradients
    # A name of its own: automatic ones differ between ranks that trace at different steps.
    found = iter(horovod.grouped_allreduce(dense, op=horovod.Average, name=f"gradients.{name}"))
    return [None if each is None else next(found) for each in gradients]


def broadcast(variables: Sequence[keras.Variable]) -> None:
    """Give all ranks the values of rank 0. Collective."""
    here = world.current()
    own = [variable.numpy() for variable in variables] if here.rank == 0 else None
    for variable, value in zip(variables, here.broadcast(own), strict=True):
        variable.assign(value)


def compare(variables: Sequence[keras.Variable], step: Any, name: str) -> None:
    """Fail, inside the step, where ranks hold other bits; after step 1 and then every 100."""
    horovod = world.horovod()

    def compared() -> Any:
        own = fingerprint(variables)
        whole = horovod.allreduce(own, op=horovod.Sum, name=f"weights.{name}")
        same = tf.equal(whole, own * horovod.size())
        tf.debugging.Assert(same, [DIFFERENT], summarize=1)
        return True

    due = tf.equal(tf.cast(step, tf.int64) % CHECK_EVERY, 1 % CHECK_EVERY)
    tf.cond(due, compared, lambda: True)


DIFFERENT = (
    "hvdtrain: the ranks hold different weights. Give them the same ones before the first step: "
    "load weights on all ranks or on none, and change none on one rank alone"
)


def fingerprint(variables: Sequence[keras.Variable]) -> Any:
    """An int64 that depends on every bit of the values, whatever their order of summation."""
    total = tf.constant(0, tf.int64)
    for number, variable in enumerate(variables, 1):
        value = tf.convert_to_tensor(variable.value)
        if value.dtype.is_floating:
            value = tf.bitcast(value, WHOLE[value.dtype.size])
        # Weighted by place: values that changed places are not the same.
        flat = tf.reshape(tf.cast(value, tf.int64), [-1])
        places = tf.range(1, tf.size(flat, out_type=tf.int64) + 1, dtype=tf.int64)
        total += number * tf.reduce_sum(flat * places)
    return total
