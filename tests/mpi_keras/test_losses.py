"""Losses that are not means over samples, which averaging over ranks would change silently."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import keras as distributed
from hvdtrain.errors import UsageError
from hvdtrain.world import World
from tests.mpi_keras.test_optimizer import distance

COUNT, BATCH = 12, 6
DRAW = np.random.default_rng(5)
WORDS = DRAW.integers(0, 4, (COUNT, 5))
TARGETS = DRAW.standard_normal((COUNT, 5, 1)).astype(np.float32)
WEIGHTS = np.arange(COUNT, dtype=np.float32)


def error_of_batch(labels: Any, outputs: Any) -> Any:
    return tf.sqrt(tf.reduce_mean((labels - outputs) ** 2))


def error_as_one_value(labels: Any, outputs: Any) -> Any:
    return tf.reduce_mean((labels - outputs) ** 2)


def fit(loss: Any, world: World | None, is_weighted: bool = False, mask: bool = False) -> Any:
    """Train on this rank's part of each batch, on all of it without a world; return the model."""
    words = keras.Input((5,))
    vectors = keras.layers.Embedding(4, 3, embeddings_initializer="ones", mask_zero=mask)(words)
    tags = keras.layers.Dense(1, kernel_initializer="ones", name="tags")(vectors)
    counts = keras.layers.Dense(5, kernel_initializer="ones", name="counts")(words / 4)
    model = keras.Model(words, {"tags": tags, "counts": counts})
    optimizer = keras.optimizers.SGD(0.1)
    rows, batch, callbacks = np.arange(COUNT), BATCH, []
    if world is not None:
        optimizer, callbacks = distributed.optimizer(optimizer), distributed.callbacks()
        batch = BATCH // world.size
        rows = rows.reshape(-1, world.size, batch)[:, world.rank].reshape(-1)
    model.compile(optimizer, {"tags": loss, "counts": "mae"})
    labels = {"tags": TARGETS[rows], "counts": TARGETS[rows, :, 0]}
    weights = {"tags": WEIGHTS[rows, None], "counts": WEIGHTS[rows]} if is_weighted else None
    data = WORDS[rows], labels, batch
    model.fit(*data, sample_weight=weights, shuffle=False, verbose=0, callbacks=callbacks)
    return model


@pytest.mark.proves(
    "Keras programs with losses that are not means over samples are refused, rank 0 alone "
    "writes files, and ranks stop together."
)
@pytest.mark.several_ranks
def test_what_is_not_a_mean_over_samples_is_refused(world: World) -> None:
    squares = keras.losses.MeanSquaredError
    cases: list[tuple[Any, dict[str, bool], str]] = [
        (squares(reduction="sum"), {}, "loss of tags has reduction='sum'"),
        (
            squares(reduction="mean_with_sample_weight"),
            {"is_weighted": True},
            "reduction='mean_with_sample_weight', .* use reduction='sum_over_batch_size'",
        ),
        ("mse", {"mask": True}, "loss of tags is a mean over unmasked values"),
        (
            keras.losses.SparseCategoricalCrossentropy(ignore_class=0),
            {},
            "loss of tags is a mean over unmasked values",
        ),
        (error_of_batch, {}, "loss of tags is .* as the mean over its halves"),
        (keras.losses.Tversky(), {}, "loss of tags is .* as the mean over its halves"),
    ]
    for loss, options, words in cases:
        with pytest.raises(UsageError, match=words):
            fit(loss, world, **options)


def test_means_over_samples_train_as_on_one_rank(world: World) -> None:
    cases: list[tuple[Any, bool]] = [
        ("mse", True),
        (keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), False),
        (error_as_one_value, False),
    ]
    for loss, is_weighted in cases:
        together, alone = (fit(loss, ranks, is_weighted) for ranks in (world, None))
        assert distance(together, alone) < 1e-4
