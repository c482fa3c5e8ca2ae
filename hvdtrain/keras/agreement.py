"""Exchange between ranks outside of the steps: values, weights, and checks that they are equal."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.errors import CheckFailed

WHOLE = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}  # integer dtypes by their bytes


def gather(what: str, value: Any) -> list[Any]:
    """Return every rank's `value`. Collective.

    Args:
        what: the action that all ranks are in, such as "comparing weights".

    Raises:
        CheckFailed: if a rank is in another action.
    """
    answers = world.current().gather((what, value))
    first = answers[0][0]
    for rank, (other, _) in enumerate(answers):
        if other != first:
            raise CheckFailed(
                f"rank {rank} is {other} while rank 0 is {first}: run the same steps and "
                "evaluations on all ranks, with the same callbacks"
            )
    return [rank_value for _, rank_value in answers]


def broadcast(variables: Sequence[keras.Variable]) -> None:
    """Give all ranks the values of rank 0. Collective."""
    current = world.current()
    values = [variable.numpy() for variable in variables] if current.rank == 0 else None
    for variable, value in zip(variables, current.broadcast(values), strict=True):
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
    digests = [int(fingerprint([variable.value])) for variable in variables]
    everywhere = gather("comparing weights", digests)
    for rank, theirs in enumerate(everywhere):
        different = [
            variable.path
            for variable, first, other in zip(variables, everywhere[0], theirs, strict=True)
            if first != other
        ]
        if different:
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise CheckFailed(
                f"rank {rank} and rank 0 hold different values of {different[0]}{more}: load "
                "weights on all ranks or on none, and change none on one rank only"
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
