"""What ranks tell one another outside of the steps: values, weights, whether they are alike."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.errors import CheckFailed

WHOLE = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}  # numbers by their bytes


def gather(what: str, value: Any) -> list[Any]:
    """Every rank's `value`. Collective.

    Raises:
        CheckFailed: if a rank is at something else.
    """
    told = world.current().gather((what, value))
    for rank, (other, _) in enumerate(told):
        if other != told[0][0]:
            raise CheckFailed(
                f"rank {rank} is {other} while rank 0 is {told[0][0]}: all ranks have to make the "
                "same steps and evaluations, with the same callbacks"
            )
    return [theirs for _, theirs in told]


def broadcast(variables: Sequence[keras.Variable]) -> None:
    """Give all ranks the values of rank 0. Collective."""
    here = world.current()
    own = [variable.numpy() for variable in variables] if here.rank == 0 else None
    for variable, value in zip(variables, here.broadcast(own), strict=True):
        variable.assign(value)


def is_float(variable: keras.Variable) -> bool:
    """Whether it holds no whole numbers, as seeds of dropout and counters are."""
    return bool(tf.as_dtype(variable.dtype).is_floating)


def average_statistics(model: keras.Model) -> None:
    """Give all ranks the mean of what is not trained and no whole number. Collective.

    Only what differs is sent: weights of frozen layers stay as they are.
    """
    here = world.current()
    if here.size == 1:
        return
    variables = [each for each in model.non_trainable_variables if is_float(each)]
    digests = gather(
        "averaging statistics", [int(fingerprint([each.value])) for each in variables]
    )
    differing = [
        variable
        for variable, *values in zip(variables, *digests, strict=True)
        if len(set(values)) > 1
    ]
    everywhere = gather("averaging statistics", [each.numpy() for each in differing])
    for variable, *values in zip(differing, *everywhere, strict=True):
        variable.assign(np.mean(values, axis=0, dtype=np.float64).astype(values[0].dtype))


def check_same(variables: Sequence[keras.Variable]) -> None:
    """Compare all bits of these variables on all ranks. Collective.

    Raises:
        CheckFailed: on all ranks, if they differ, naming a variable and a rank.
    """
    own = [int(fingerprint([variable.value])) for variable in variables]
    everywhere = gather("comparing weights", own)
    for rank, theirs in enumerate(everywhere):
        different = [
            variable.path
            for variable, mine, other in zip(variables, everywhere[0], theirs, strict=True)
            if mine != other
        ]
        if different:
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise CheckFailed(
                f"rank {rank} holds another {different[0]}{more} than rank 0: load weights on all "
                "ranks or on none, and change none on one rank alone"
            )


def fingerprint(values: Sequence[Any]) -> Any:
    """An int64 that depends on every bit of the values, whatever their order of summation."""
    total = tf.constant(0, tf.int64)
    for number, value in enumerate(values, 1):
        bits = tf.convert_to_tensor(value)
        if bits.dtype.is_floating:
            bits = tf.bitcast(bits, WHOLE[bits.dtype.size])
        # Weighted by place: values that changed places are not the same.
        flat = tf.reshape(tf.cast(bits, tf.int64), [-1])
        places = tf.range(1, tf.size(flat, out_type=tf.int64) + 1, dtype=tf.int64)
        total += number * tf.reduce_sum(flat * places)
    return total
