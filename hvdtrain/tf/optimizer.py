"""An optimizer of Keras 3 that averages gradients over all ranks before it applies them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from hvdtrain import world
from hvdtrain.errors import UsageError
from hvdtrain.tf.agreement import broadcast, fingerprint, gather
from hvdtrain.tf.reduction import sums

if TYPE_CHECKING:
    _Mixed = Any
else:
    _Mixed = object  # the class that `_Averaging` is mixed into has what it calls

CHECK_EVERY = 100  # steps from one comparison of the ranks' weights to the next
# Names of what is reduced: Keras's own names of optimizers count what each rank has made.
_numbers = count()

DIFFERENT = (
    "hvdtrain: the ranks hold different weights. Give them the same ones before the first step: "
    "build the model before fit, load weights on all ranks or on none, and change none on one "
    "rank alone"
)


def optimizer(own: Any) -> Any:
    """Let `own` average the gradients over all ranks, in one all-reduce a step.

    The optimizer is changed, not copied: it keeps its variables and settings, and is returned.
    (Under the policy mixed_float16 what is returned is a LossScaleOptimizer around it, which
    `compile` would make otherwise: ranks have to agree on a step that overflows.) When it is built
    the model's trainable variables take rank 0's values, so that all ranks begin alike. Every 100
    steps, and after the first, the weights of all ranks are compared inside the step. A rank's
    loss counts as the mean over the samples that the rank has: give all ranks as many, or weights
    (`hvdtrain.tf.datasets` does).

    With `gradient_accumulation_steps`, ranks communicate when the weights change, not before.
    In a world of one the optimizer is returned as it was. Collective.

    Raises:
        UsageError: if `own` is no optimizer of Keras 3, or not of one class on all ranks.
    """
    if not isinstance(own, keras.optimizers.Optimizer):
        raise UsageError(
            f"a {type(own).__name__} is no optimizer of Keras 3: "
            "give one of keras.optimizers, with the settings of yours"
        )
    if world.current().size == 1 or is_distributed(own):
        return own
    scales = isinstance(own, keras.optimizers.LossScaleOptimizer)
    if keras.config.dtype_policy().name == "mixed_float16" and not scales:
        own = keras.optimizers.LossScaleOptimizer(own)
    kind = type(own)
    facts = gather("making an optimizer distributed", (kind.__name__, own.built))
    if len(set(facts)) > 1:
        raise UsageError(
            "the ranks' optimizers are of different classes, or built on some ranks alone: make "
            "or load the same model on all ranks"
        )
    # Saved models name the class: they load where there is no hvdtrain, as the class it was.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own.__class__ = type(kind.__name__, (_Averaging, kind), names)
    own.reduction = f"optimizer.{next(_numbers)}"
    return own


def is_distributed(own: object) -> bool:
    """Whether this optimizer averages over the ranks."""
    return isinstance(own, _Averaging)


@contextmanager
def as_it_was(own: Any) -> Iterator[None]:
    """The optimizer has the class that it was given with: what is saved says nothing of ranks."""
    kind = type(own)
    if not is_distributed(own):
        yield
        return
    _, own.__class__ = kind.__bases__
    try:
        yield
    finally:
        own.__class__ = kind


class _Averaging(_Mixed):
    """What an optimizer does before its own class does: Keras 3 calls nothing but `apply`."""

    reduction: str

    def build(self, variables: Sequence[keras.Variable]) -> None:
        # Its own variables begin alike on all ranks, and in a traced step do not exist yet.
        super().build(variables)
        with tf.init_scope():
            broadcast([each for each in variables if each.value.is_initialized()])

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        if not self.gradient_accumulation_steps:
            grads = average(grads, self.reduction)
        super().apply(grads, trainable_variables)
        variables = trainable_variables or self._trainable_variables
        compare(variables, self.iterations, self.reduction)

    def _clip_gradients(self, grads: Any) -> Any:
        # With accumulation this is called once an update, with what was accumulated.
        if self.gradient_accumulation_steps:
            grads = average(list(grads), self.reduction)
        return super()._clip_gradients(grads)


def average(gradients: list[Any], name: str) -> list[Any]:
    """The mean over all ranks of each gradient; None where there is none."""
    places = [place for place, each in enumerate(gradients) if each is not None]
    dense = [tf.convert_to_tensor(gradients[place]) for place in places]
    found = list(gradients)
    # A name of its own: automatic ones differ between ranks that trace at different steps.
    for place, total in zip(places, sums(dense, f"{name}.gradients"), strict=True):
        found[place] = total / tf.cast(world.current().size, total.dtype)
    return found


def compare(variables: Sequence[keras.Variable], step: Any, name: str) -> None:
    """Fail, inside the step, where ranks hold other bits; after step 1 and then every 100."""

    def compared() -> Any:
        same = are_same([each.value for each in variables], f"{name}.weights")
        tf.debugging.Assert(same, [DIFFERENT], summarize=1)
        return True

    due = tf.equal(tf.cast(step, tf.int64) % CHECK_EVERY, 1 % CHECK_EVERY)
    tf.cond(due, compared, lambda: True)


def are_same(values: Sequence[Any], name: str) -> Any:
    """Whether all ranks hold the same bits, as a tensor; false on one rank at least if not."""
    horovod = world.horovod()
    own = fingerprint(values)
    return tf.equal(horovod.allreduce(own, op=horovod.Sum, name=name), own * horovod.size())
