"""Sums over all ranks, inside a traced step."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain import world


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
