"""Samples of the ranks' `tf.data` pipelines: those of training in PyTorch, once each."""

from pathlib import Path

import keras
import numpy as np
import pytest

from hvdtrain import data as packed
from hvdtrain import keras as distributed
from hvdtrain.backends.tensorflow.step import cnn
from hvdtrain.data import order
from hvdtrain.data.index import read_index
from hvdtrain.data.shards import open_split
from hvdtrain.errors import UsageError
from hvdtrain.world import World

COUNT, BATCH = 61, 16


@pytest.fixture(scope="module")
def folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = world.broadcast(tmp_path_factory.mktemp("data") / "set")
    if world.rank == 0:
        packed.synth(path, COUNT, 5, size=16, seed=1)
    world.barrier()
    return path


@pytest.mark.proves(
    "`hvdtrain.keras` gives each rank its share of each batch, and shares weights, "
    "metrics and statistics between ranks."
)
def test_ranks_share_each_batch_of_the_order_that_training_has(world: World, folder: Path) -> None:
    """Sample weights make the mean of the ranks' means the mean of an uneven batch."""
    index = read_index(str(folder))
    data = distributed.datasets(folder, BATCH, seed=3, holdout=0.2)
    rows, held = order.holdout(COUNT, 0.2, index.hash, 3)
    assert data.steps_per_epoch == -(-len(rows) // BATCH)
    batches = list(data.train.take(2 * data.steps_per_epoch).as_numpy_iterator())
    everywhere = world.gather(batches)
    split = index.splits["train"]
    with open_split(index, "train") as samples:
        for epoch in range(2):
            wanted = order.epoch_order(
                *(rows, index.hash, 3, epoch), split.chunk_rows, order.window_rows(index)
            )
            for number, (start, stop) in enumerate(order.step_slices(len(rows), BATCH)):
                whole = samples.gather(wanted[start:stop])
                parts = [steps[epoch * data.steps_per_epoch + number] for steps in everywhere]
                # A rank without samples of a batch has one sample of weight 0.
                parts = [part for part in parts if part[2][0] > 0]
                images = np.concatenate([part[0] for part in parts])
                assert np.array_equal(np.round(images * 255), whole.images)
                assert np.array_equal(np.concatenate([part[1] for part in parts]), whole.labels)
                shares = [part[2][0] / world.size for part in parts]
                sizes = [len(part[1]) / (stop - start) for part in parts]
                assert shares == pytest.approx(sizes)
    assert data.validation is not None
    counts = world.gather(sum(len(labels) for _, labels, _ in data.validation))
    assert sum(counts) == len(held)


def test_a_batch_of_fewer_samples_than_ranks_counts_each_once(world: World, folder: Path) -> None:
    """61 samples in batches of 60: the last batch has a single sample, on one rank."""
    data = distributed.datasets(folder, 60)
    *_, (_, labels, weights) = data.train.take(2).as_numpy_iterator()
    everywhere = world.gather((labels, weights))
    assert all(len(labels) == 1 for labels, _ in everywhere)
    assert sorted(float(weights[0]) for _, weights in everywhere) == [0.0] * (world.size - 1) + [
        float(world.size)
    ]


def test_pixels_are_what_was_asked_for(world: World, folder: Path) -> None:
    index = read_index(str(folder))
    plain = distributed.datasets(folder, BATCH)
    normalised = distributed.datasets(folder, BATCH, normalise="meanstd")
    unit, normal = (next(iter(pipelines.train))[0].numpy() for pipelines in (plain, normalised))
    assert unit.min() >= 0
    assert 0.5 < unit.max() <= 1
    mean, std = np.asarray(index.mean), np.asarray(index.std)
    assert normal == pytest.approx((unit - mean) / std, abs=1e-5)


def test_a_batch_smaller_than_the_ranks_is_refused(world: World, folder: Path) -> None:
    if world.size == 1:
        assert distributed.datasets(folder, 1).steps_per_epoch == COUNT
        return
    with pytest.raises(UsageError, match="too small for"):
        distributed.datasets(folder, world.size - 1)


@pytest.mark.several_ranks
def test_losses_that_ignore_weights_are_refused_with_uneven_batches(folder: Path) -> None:
    data = distributed.datasets(folder, BATCH)
    model = keras.Sequential([keras.Input((16, 16, 3)), keras.layers.Flatten()])
    model.add(keras.layers.Dense(data.classes, activity_regularizer="l2"))
    model.compile(distributed.optimizer(keras.optimizers.SGD()), keras.losses.get("mse"))
    with pytest.raises(UsageError, match=r"which a batch of 1[36] images needs"):
        callbacks = distributed.callbacks()
        model.fit(data.train, steps_per_epoch=1, verbose=0, callbacks=callbacks)


def test_what_is_evaluated_is_each_sample_once(world: World, folder: Path) -> None:
    """Loss and accuracy are those of one process, for different numbers of samples per rank."""
    data = distributed.datasets(folder, BATCH, holdout=0.2)
    index = read_index(str(folder))
    with open_split(index, "test") as samples:
        whole = samples.gather(np.arange(len(samples)))
    model = cnn(data.classes, data.image_size, seed=world.size)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(distributed.optimizer(keras.optimizers.SGD()), loss, metrics=["accuracy"])
    wanted = model.evaluate(whole.images / np.float32(255), whole.labels, 7, 0, return_dict=True)
    results = distributed.evaluate(model, data.test, verbose=0)
    assert results["accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-6)
    assert results["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


def test_a_model_learns_from_them(world: World, folder: Path) -> None:
    data = distributed.datasets(folder, BATCH)
    model = keras.Sequential(
        [
            keras.layers.Input((data.image_size, data.image_size, 3)),
            keras.layers.Flatten(),
            keras.layers.Dense(data.classes, kernel_initializer="zeros"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = distributed.optimizer(keras.optimizers.Adam(0.001))
    model.compile(optimizer, loss, metrics=["accuracy"])
    history = model.fit(
        data.train,
        steps_per_epoch=data.steps_per_epoch,
        epochs=20,
        validation_data=data.test,
        callbacks=distributed.callbacks(),
        verbose=0,
    ).history
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert len(set(world.gather(history["val_accuracy"][-1]))) == 1
    results = distributed.evaluate(model, data.test, verbose=0)
    assert results["accuracy"] == pytest.approx(history["val_accuracy"][-1])
