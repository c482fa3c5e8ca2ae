"""A packed data set as `tf.data` pipelines: the samples, and the order, of training in PyTorch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.data import order
from hvdtrain.data.shards import Index, Samples, open_split, read_index
from hvdtrain.errors import UsageError

Rows = order.Rows
Taken = tuple[np.ndarray, np.ndarray, np.ndarray]  # images, labels, weights
AHEAD = 2  # batches made before they are asked for
CACHE_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Datasets:
    """This rank's part of a data set, for `fit` and `evaluate`.

    Each is of batches (images float32 [n, H, W, C], labels int64 [n], weights float32 [n]).
    The weights make the mean over ranks of each rank's loss the mean over the samples of the
    global batch, where ranks have unlike numbers of them: they are 1 in all but an uneven batch.

    Attributes:
        train: without an end, epoch after epoch: give `steps_per_epoch` to `fit`.
        validation: what was held out, or None.
        test: the test split, or None if there is none.
        classes: how many there are.
        image_size: side of an image in pixels.
    """

    train: tf.data.Dataset
    validation: tf.data.Dataset | None
    test: tf.data.Dataset | None
    steps_per_epoch: int
    classes: int
    image_size: int


def datasets(
    data: str | Path,
    batch_size: int,
    *,
    seed: int = 0,
    holdout: float = 0.0,
    normalise: Literal["unit", "meanstd"] = "unit",
) -> Datasets:
    """Open the packed data set of a folder, for the ranks of the world.

    Args:
        batch_size: images of a step, over all ranks together.
        seed: of the order of samples, and of what is held out.
        holdout: part of the training set held out as validation.
        normalise: "unit" divides pixels by 255; "meanstd" besides takes away the mean of each
            channel, and divides by its deviation.

    Raises:
        UsageError, DataError: if the folder holds no good data set, or too few samples.
    """
    index = read_index(str(data))
    here = world.current()
    rows, held = order.holdout(index.splits["train"].count, holdout, index.hash, seed)
    if batch_size < here.size:
        raise UsageError(f"a batch of {batch_size} images is too small for {here.size} ranks")
    split = {
        name: open_split(index, name, CACHE_BYTES // here.local_size) for name in index.splits
    }

    def training() -> Iterator[Taken]:
        for epoch in range(2**31):
            taken = order.epoch_order(
                *(rows, index.hash, seed, epoch),
                *(index.splits["train"].chunk_rows, order.window_rows(index)),
            )
            yield from _batches(split["train"], taken, batch_size)

    def evaluation(samples: Samples, taken: Rows) -> tf.data.Dataset:
        steps = -(-len(taken) // batch_size)
        return _dataset(lambda: _batches(samples, taken, batch_size), steps, index, normalise)

    has_test = "test" in split
    return Datasets(
        train=_dataset(training, tf.data.INFINITE_CARDINALITY, index, normalise),
        validation=evaluation(split["train"], held) if len(held) else None,
        test=evaluation(split["test"], np.arange(len(split["test"]))) if has_test else None,
        steps_per_epoch=-(-len(rows) // batch_size),
        classes=index.classes,
        image_size=index.image_shape[0],
    )


def _batches(samples: Samples, rows: Rows, batch_size: int) -> Iterator[Taken]:
    """This rank's contiguous share of each global batch of `rows`."""
    here = world.current()
    for start, stop in order.step_slices(len(rows), batch_size):
        first, last = order.split(stop - start, [1] * here.size)[here.rank]
        weight = (last - first) * here.size / (stop - start)
        if first == last:  # Keras has no empty batch: a sample that counts nothing
            first, last = (first, first + 1) if first < stop - start else (first - 1, first)
        batch = samples.gather(rows[start + first : start + last])
        yield batch.images, batch.labels, np.full(last - first, weight, np.float32)


def _dataset(
    make: Callable[[], Iterator[Taken]], steps: int, index: Index, normalise: str
) -> tf.data.Dataset:
    """The pipeline of so many batches."""
    signature = (
        tf.TensorSpec((None, *index.image_shape), tf.uint8),
        tf.TensorSpec((None,), tf.int64),
        tf.TensorSpec((None,), tf.float32),
    )
    mean, std = np.zeros(index.image_shape[2], np.float32), np.ones(1, np.float32)
    if normalise == "meanstd":
        mean, std = np.asarray(index.mean, np.float32), np.asarray(index.std, np.float32)

    def prepare(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (tf.cast(images, tf.float32) / 255 - mean) / std, labels, weights

    made = tf.data.Dataset.from_generator(make, output_signature=signature)
    counted = made.apply(tf.data.experimental.assert_cardinality(steps))
    return counted.map(prepare, deterministic=True).prefetch(AHEAD)
