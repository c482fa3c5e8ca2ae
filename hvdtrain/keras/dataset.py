"""A packed data set as `tf.data` pipelines, with the same samples and order as in PyTorch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.data import order
from hvdtrain.data.index import Index, read_index
from hvdtrain.data.shards import Samples, open_split
from hvdtrain.engine.feed import Normalisation, normalisation
from hvdtrain.errors import UsageError

Rows = order.Rows
WeightedBatch = tuple[np.ndarray, np.ndarray, np.ndarray]  # images, labels, weights
AHEAD = 2  # batches prepared in advance
CACHE_BYTES = 2 * 2**30
uneven: set[int] = set()  # sizes of batches that ranks share unevenly, in the sets opened so far


@dataclass(frozen=True)
class Datasets:
    """This rank's part of a data set, for `fit` and `evaluate`.

    Batches are (images float32 [n, H, W, C], labels int64 [n], weights float32 [n]). Keras refuses
    `class_weight` beside weights: multiply the weights of `train` by it, with `train.map`.
    If ranks have different numbers of samples of a global batch, the weights make the mean of the
    ranks' losses the mean over all samples. In training all weights are 1 except in an uneven
    batch, in evaluation they are always 1. (In an uneven batch the loss and metrics of training
    that Keras logs are weighted in this way; gradients are exact.)

    Attributes:
        train: infinite, epoch after epoch: pass `steps_per_epoch` to `fit`.
        validation: the held-out samples, or None.
        test: the test split, or None if there is none.
        classes: number of classes.
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
    first_epoch: int = 0,
) -> Datasets:
    """Open the packed data set of a folder, for the ranks of the world.

    Args:
        batch_size: images per step, of all ranks together.
        seed: for the order of samples, and for the choice of held-out samples.
        holdout: fraction of the training set held out for validation.
        normalise: "unit" divides pixels by 255; "meanstd" then subtracts the mean of each channel
            of the training images, and divides by its deviation.
        first_epoch: the epoch whose order comes first; `initial_epoch` of a `fit` that resumes.

    Raises:
        UsageError, DataError: if the data set is damaged, or has too few samples.
    """
    index = read_index(str(data))
    current = world.current()
    rows, held = order.holdout(index.splits["train"].count, holdout, index.hash, seed)
    if batch_size < current.size:
        raise UsageError(
            f"a batch of {batch_size} images is too small for {current.size} ranks: use at least "
            "one image per rank"
        )
    uneven.update(size for size in (batch_size, len(rows) % batch_size) if size % current.size)
    memory = CACHE_BYTES // current.local_size
    split = {name: open_split(index, name, memory) for name in index.splits}
    normal = normalisation(normalise, index, rows, current)
    training = partial(
        _epochs,
        index=index,
        samples=split["train"],
        rows=rows,
        seed=seed,
        first_epoch=first_epoch,
        batch_size=batch_size,
    )
    evaluated = partial(
        _evaluated, index=index, normal=normal, images=-(-batch_size // current.size)
    )
    return Datasets(
        train=_dataset(training, tf.data.INFINITE_CARDINALITY, index, normal),
        validation=evaluated(split["train"], held) if len(held) else None,
        test=evaluated(split["test"], np.arange(len(split["test"]))) if "test" in split else None,
        steps_per_epoch=-(-len(rows) // batch_size),
        classes=index.classes,
        image_size=index.image_shape[0],
    )


def _evaluated(
    samples: Samples, rows: Rows, index: Index, normal: Normalisation, images: int
) -> tf.data.Dataset:
    """Return this rank's share of the rows for evaluation, in batches of `images` images."""
    share = _own_share(rows)
    batches = partial(_evaluation, samples, share, images)
    return _dataset(batches, -(-len(share) // images), index, normal)


def _own_share(rows: Rows) -> Rows:
    """Return this rank's contiguous share of the rows for evaluation."""
    current = world.current()
    if len(rows) < current.size:
        raise UsageError(
            f"{len(rows)} samples cannot be evaluated on {current.size} ranks: use more "
            "samples, or fewer ranks"
        )
    first, last = order.split(len(rows), [1] * current.size)[current.rank]
    return rows[first:last]


def _epochs(
    index: Index, samples: Samples, rows: Rows, seed: int, first_epoch: int, batch_size: int
) -> Iterator[WeightedBatch]:
    """Yield this rank's part of all batches, epoch after epoch, without an end."""
    for epoch in count(first_epoch):
        yield from _training(samples, order.training_order(index, rows, seed, epoch), batch_size)


def _training(samples: Samples, rows: Rows, batch_size: int) -> Iterator[WeightedBatch]:
    """Yield this rank's contiguous share of each global batch of `rows`."""
    current = world.current()
    for start, stop in order.step_slices(len(rows), batch_size):
        first, last = order.split(stop - start, [1] * current.size)[current.rank]
        weight = (last - first) * current.size / (stop - start)
        if first == last:  # Keras does not support empty batches: use a sample of weight 0
            first = min(first, stop - start - 1)
            last = first + 1
        batch = samples.gather(rows[start + first : start + last])
        yield batch.images, batch.labels, np.full(last - first, weight, np.float32)


def _evaluation(samples: Samples, rows: Rows, images: int) -> Iterator[WeightedBatch]:
    """Yield all of `rows`, in batches of `images` images."""
    for start, stop in order.step_slices(len(rows), images):
        batch = samples.gather(rows[start:stop])
        yield batch.images, batch.labels, np.ones(stop - start, np.float32)


def _dataset(
    make: Callable[[], Iterator[WeightedBatch]], steps: int, index: Index, normal: Normalisation
) -> tf.data.Dataset:
    """Return the pipeline of `steps` batches from `make`."""
    signature = (
        tf.TensorSpec((None, *index.image_shape), tf.uint8),
        tf.TensorSpec((None,), tf.int64),
        tf.TensorSpec((None,), tf.float32),
    )
    mean, std = (np.asarray(values, np.float32) for values in normal)

    def prepare(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (tf.cast(images, tf.float32) / 255 - mean) / std, labels, weights

    dataset = tf.data.Dataset.from_generator(make, output_signature=signature)
    counted = dataset.apply(tf.data.experimental.assert_cardinality(steps))
    return counted.map(prepare).prefetch(AHEAD)
