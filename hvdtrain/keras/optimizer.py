"""An optimizer of Keras 3 that averages gradients over all ranks before it applies them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from hvdtrain import world
from hvdtrain.errors import UsageError
from hvdtrain.keras.ranks import broadcast, fingerprint, gather

if TYPE_CHECKING:
    _Mixed = Any
else:
    _Mixed = object  # `_Averaging` calls methods of the class that it is mixed into

COMPRESSIONS = ("none", "fp16")
CHECK_EVERY = 100  # steps between comparisons of the ranks' weights
# For the names of all-reduces. Keras's names of optimizers may differ: each rank counts its own.
_numbers = count()

DIFFERENT = (
    "hvdtrain: the ranks hold different weights: build the model before fit, load weights on all "
    "ranks or on none, and change none on one rank only"
)


def optimizer(own: Any, compress: str = "none") -> Any:
    """Make `own` average the gradients over all ranks, in one all-reduce per step.

    The optimizer is changed, not copied: it keeps its variables and settings, and is returned.
    (Under the policy mixed_float16 a LossScaleOptimizer around it is returned, which `compile`
    would make otherwise: ranks have to agree on a step that overflows.) When it is built, the
    model's trainable variables get rank 0's values, so that all ranks start with equal weights.
    After the first step and after every 100th, the weights of all ranks are compared inside the
    step. A rank's loss must be the mean over its samples: give all ranks the same number of
    samples, or weights (`hvdtrain.keras.datasets` does).

    With `gradient_accumulation_steps`, ranks communicate only when the weights change.
    In a world of one rank the optimizer is returned unchanged. Collective.

    Args:
        compress: "fp16" sends gradients in 16 bits, rounded and without error feedback: a residual
            would be a variable, without which a saved model would not load elsewhere.

    Raises:
        UsageError: if `own` is not an optimizer of Keras 3, or the ranks have different classes or
            ways to compress.
    """
    if compress not in COMPRESSIONS:
        raise UsageError(f"compress={compress!r} is not supported for Keras: use none or fp16")
    if not isinstance(own, keras.optimizers.Optimizer):
        raise UsageError(
            f"a {type(own).__name__} is not an optimizer of Keras 3: "
            "use one of keras.optimizers, with the same settings"
        )
    if world.current().size == 1 or is_distributed(own):
        return own
    scales = isinstance(own, keras.optimizers.LossScaleOptimizer)
    if keras.config.dtype_policy().name == "mixed_float16" and not scales:
        own = keras.optimizers.LossScaleOptimizer(own)
    kind = type(own)
    facts = gather("making an optimizer distributed", (kind.__name__, own.built, compress))
    if len(set(facts)) > 1:
        raise UsageError(
            "the ranks' optimizers have different classes or ways to compress, or are built on "
            "some ranks only: make or load the same model on all ranks"
        )
    # Saved models contain this name of the class, so that they load without hvdtrain.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own.__class__ = type(kind.__name__, (_Averaging, kind), names)
    own.reduction, own.is_half = f"optimizer.{next(_numbers)}", compress == "fp16"
    return own


def is_distributed(optimizer: object) -> bool:
    """Return whether this optimizer averages over the ranks."""
    return isinstance(optimizer, _Averaging)


@contextmanager
def as_it_was(optimizer: Any) -> Iterator[None]:
    """Give the optimizer its original class, so that saved files do not depend on hvdtrain."""
    kind = type(optimizer)
    if not is_distributed(optimizer):
        yield
        return
    _, optimizer.__class__ = kind.__bases__
    try:
        yield
    finally:
        optimizer.__class__ = kind


class _Averaging(_Mixed):
    """Methods that run before those of the optimizer's own class: Keras 3 calls only `apply`."""

    reduction: str
    is_half: bool

    def build(self, variables: Sequence[keras.Variable]) -> None:
        # The optimizer's own variables start equal on all ranks. In a traced step they do not
        # exist yet.
        super().build(variables)
        with tf.init_scope():
            broadcast([variable for variable in variables if variable.value.is_initialized()])

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        if not self.gradient_accumulation_steps:
            grads = average(grads, self.reduction, self.is_half)
        super().apply(grads, trainable_variables)
        variables = trainable_variables or self._trainable_variables
        compare(variables, self.iterations, self.reduction)

    def _clip_gradients(self, grads: Any) -> Any:
        # With accumulation Keras calls this once per update, with the accumulated gradients.
        if self.gradient_accumulation_steps:
            grads = average(list(grads), self.reduction, self.is_half)
        return super()._clip_gradients(grads)


def average(gradients: list[Any], name: str, is_half: bool = False) -> list[Any]:
    """Return the mean over all ranks of each gradient; None stays None.

    Args:
        is_half: whether gradients travel in 16 bits.
    """
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    dense = [tf.convert_to_tensor(gradients[place]) for place in places]
    means, size = list(gradients), world.current().size
    kinds = [value.dtype for value in dense]
    if is_half:  # divided before they are added: a sum could exceed the range of fp16
        dense = [tf.cast(value / size, tf.float16) for value in dense]
    # An explicit name: automatic names differ between ranks that trace at different steps.
    totals = sums(dense, f"{name}.gradients")
    for place, total, kind in zip(places, totals, kinds, strict=True):
        mean = total if is_half else total / tf.cast(size, total.dtype)
        means[place] = tf.cast(mean, kind)
    return means


def compare(variables: Sequence[keras.Variable], step: Any, name: str) -> None:
    """Fail inside the step if the ranks' weights differ; after step 1, then every 100 steps."""

    def compared() -> Any:
        same = are_same([variable.value for variable in variables], f"{name}.weights")
        tf.debugging.Assert(same, [DIFFERENT], summarize=1)
        return True

    due = tf.equal(tf.cast(step, tf.int64) % CHECK_EVERY, 1 % CHECK_EVERY)
    tf.cond(due, compared, lambda: True)


def are_same(values: Sequence[Any], name: str) -> Any:
    """Return a tensor: whether all ranks hold the same bits; false on at least one rank if not."""
    horovod = world.horovod()
    local = fingerprint(values)
    return tf.equal(horovod.allreduce(local, op=horovod.Sum, name=name), local * horovod.size())


def sums(values: Sequence[Any], name: str) -> list[Any]:
    """Return the sums of dense tensors over all ranks: one all-reduce per dtype. Collective.

    The tensors of a dtype are sent as one: this takes half of the time of a Horovod group of the
    same size, and the order of the additions is always the same.

    Args:
        name: of the all-reduce; the same on all ranks.
    """
    totals: list[Any] = [None] * len(values)
    horovod = world.horovod()
    for kind in dict.fromkeys(value.dtype for value in values):
        places = [place for place, value in enumerate(values) if value.dtype == kind]
        flat = tf.concat([tf.reshape(values[place], [-1]) for place in places], axis=0)
        # Horovod does not know bfloat16.
        sent = tf.cast(flat, tf.float32) if kind == tf.bfloat16 else flat
        total = horovod.allreduce(sent, op=horovod.Sum, name=f"{name}.{kind.name}")
        parts = tf.split(tf.cast(total, kind), [tf.size(values[place]) for place in places])
        for place, part in zip(places, parts, strict=True):
            totals[place] = tf.reshape(part, tf.shape(values[place]))
    return totals
