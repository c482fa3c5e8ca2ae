"""The samples that ranks are given, by `tf.data`: those of training in PyTorch, once each."""

from pathlib import Path

import keras
import numpy as np
import pytest

from hvdtrain import data as packed
from hvdtrain import tf as distributed
from hvdtrain.data import order
from hvdtrain.data.shards import open_split, read_index
from hvdtrain.errors import UsageError
from hvdtrain.tf.cnn import cnn
from hvdtrain.world import World

COUNT, BATCH = 61, 16


@pytest.fixture(scope="module")
def folder(here: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = here.broadcast(tmp_path_factory.mktemp("data") / "set")
    if here.rank == 0:
        packed.synth(path, COUNT, 5, size=16, seed=1)
    here.barrier()
    return path


def test_ranks_share_each_batch_of_the_order_that_training_has(here: World, folder: Path) -> None:
    """Two epochs; the weights make the ranks' means the mean of an uneven batch."""
    index = read_index(str(folder))
    given = distributed.datasets(folder, BATCH, seed=3, holdout=0.2)
    rows, held = order.holdout(COUNT, 0.2, index.hash, 3)
    assert given.steps_per_epoch == -(-len(rows) // BATCH)
    batches = list(given.train.take(2 * given.steps_per_epoch).as_numpy_iterator())
    everywhere = here.gather(batches)
    split = index.splits["train"]
    with open_split(index, "train") as samples:
        for epoch in range(2):
            wanted = order.epoch_order(
                *(rows, index.hash, 3, epoch), split.chunk_rows, order.window_rows(index)
            )
            for number, (start, stop) in enumerate(order.step_slices(len(rows), BATCH)):
                whole = samples.gather(wanted[start:stop])
                parts = [steps[epoch * given.steps_per_epoch + number] for steps in everywhere]
                # A rank that has none of a batch has a sample that counts nothing.
                parts = [part for part in parts if part[2][0] > 0]
                images = np.concatenate([part[0] for part in parts])
                assert np.array_equal(np.round(images * 255), whole.images)
                assert np.array_equal(np.concatenate([part[1] for part in parts]), whole.labels)
                shares = [part[2][0] / here.size for part in parts]
                sizes = [len(part[1]) / (stop - start) for part in parts]
                assert shares == pytest.approx(sizes)
    assert given.validation is not None
    counts = here.gather(sum(len(labels) for _, labels, _ in given.validation))
    assert sum(counts) == len(held)


def test_a_batch_of_fewer_samples_than_ranks_counts_each_once(here: World, folder: Path) -> None:
    """61 samples in batches of 60: the last one has a single sample, which one rank has."""
    given = distributed.datasets(folder, 60)
    *_, (_, labels, weights) = given.train.take(2).as_numpy_iterator()
    everywhere = here.gather((labels, weights))
    assert all(len(labels) == 1 for labels, _ in everywhere)
    assert sorted(float(weights[0]) for _, weights in everywhere) == [0.0] * (here.size - 1) + [
        float(here.size)
    ]


def test_pixels_are_what_was_asked_for(here: World, folder: Path) -> None:
    index = read_index(str(folder))
    plain = distributed.datasets(folder, BATCH)
    normalised = distributed.datasets(folder, BATCH, normalise="meanstd")
    unit, normal = (next(iter(each.train))[0].numpy() for each in (plain, normalised))
    assert unit.min() >= 0
    assert 0.5 < unit.max() <= 1
    mean, std = np.asarray(index.mean), np.asarray(index.std)
    assert normal == pytest.approx((unit - mean) / std, abs=1e-5)


def test_a_batch_smaller_than_the_ranks_is_refused(here: World, folder: Path) -> None:
    if here.size == 1:
        assert distributed.datasets(folder, 1).steps_per_epoch == COUNT
        return
    with pytest.raises(UsageError, match="too small for"):
        distributed.datasets(folder, here.size - 1)


def test_what_is_evaluated_is_each_sample_once(here: World, folder: Path) -> None:
    """As one process does it: loss and accuracy of unlike numbers of samples a rank."""
    given = distributed.datasets(folder, BATCH, holdout=0.2)
    index = read_index(str(folder))
    with open_split(index, "test") as samples:
        whole = samples.gather(np.arange(len(samples)))
    model = cnn(given.classes, given.image_size, seed=here.size)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(distributed.optimizer(keras.optimizers.SGD()), loss, metrics=["accuracy"])
    wanted = model.evaluate(whole.images / np.float32(255), whole.labels, 7, 0, return_dict=True)
    found = distributed.evaluate(model, given.test, verbose=0)
    assert found["accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-6)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


def test_a_model_learns_from_them(here: World, folder: Path) -> None:
    given = distributed.datasets(folder, BATCH)
    model = keras.Sequential(
        [
            keras.layers.Input((given.image_size, given.image_size, 3)),
            keras.layers.Flatten(),
            keras.layers.Dense(given.classes, kernel_initializer="zeros"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = distributed.optimizer(keras.optimizers.Adam(0.001))
    model.compile(optimizer, loss, metrics=["accuracy"])
    history = model.fit(
        given.train,
        steps_per_epoch=given.steps_per_epoch,
        epochs=20,
        validation_data=given.test,
        callbacks=distributed.callbacks(),
        verbose=0,
    ).history
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert len(set(here.gather(history["val_accuracy"][-1]))) == 1
    found = distributed.evaluate(model, given.test, verbose=0)
    assert found["accuracy"] == pytest.approx(history["val_accuracy"][-1])
