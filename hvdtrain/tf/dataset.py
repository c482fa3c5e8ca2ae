"""A packed data set as `tf.data` pipelines: the samples, and the order, of training in PyTorch."""

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
from hvdtrain.data.shards import Index, Samples, open_split, read_index
from hvdtrain.errors import UsageError
from hvdtrain.training.normalise import Normalisation, normalisation

Rows = order.Rows
Taken = tuple[np.ndarray, np.ndarray, np.ndarray]  # images, labels, weights
AHEAD = 2  # batches made before they are asked for
CACHE_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Datasets:
    """This rank's part of a data set, for `fit` and `evaluate`.

    Each is of batches (images float32 [n, H, W, C], labels int64 [n], weights float32 [n]).
    The weights make the mean over ranks of each rank's loss the mean over the samples of the
    global batch, where ranks have unlike numbers of them: in training they are 1 in all but an
    uneven batch, in evaluation always. (In an uneven batch the loss and the metrics that Keras
    logs of training are those of such a mean; gradients are exact.)

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
    first_epoch: int = 0,
) -> Datasets:
    """Open the packed data set of a folder, for the ranks of the world.

    Args:
        batch_size: images of a step, over all ranks together.
        seed: of the order of samples, and of what is held out.
        holdout: part of the training set held out as validation.
        normalise: "unit" divides pixels by 255; "meanstd" besides takes away the mean of each
            channel, of the images trained on, and divides by its deviation.
        first_epoch: whose order comes first; for a `fit` that goes on, its `initial_epoch`.

    Raises:
        UsageError, DataError: if the folder holds no good data set, or too few samples.
    """
    index = read_index(str(data))
    here = world.current()
    rows, held = order.holdout(index.splits["train"].count, holdout, index.hash, seed)
    if batch_size < here.size:
        raise UsageError(f"a batch of {batch_size} images is too small for {here.size} ranks")
    memory = CACHE_BYTES // here.local_size
    split = {name: open_split(index, name, memory) for name in index.splits}
    normal = normalisation(normalise, index, rows, here)
    training = partial(_epochs, index, split["train"], rows, seed, first_epoch, batch_size)
    evaluated = partial(_evaluated, index=index, normal=normal, images=-(-batch_size // here.size))
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
    """This rank's share of what is evaluated, in batches of so many images."""
    own = _own_share(rows)
    batches = partial(_evaluation, samples, own, images)
    return _dataset(batches, -(-len(own) // images), index, normal)


def _own_share(rows: Rows) -> Rows:
    """This rank's contiguous share of what is evaluated."""
    here = world.current()
    if len(rows) < here.size:
        raise UsageError(f"{len(rows)} samples cannot be evaluated on {here.size} ranks")
    first, last = order.split(len(rows), [1] * here.size)[here.rank]
    return rows[first:last]


def _epochs(
    index: Index, samples: Samples, rows: Rows, seed: int, first_epoch: int, batch_size: int
) -> Iterator[Taken]:
    """This rank's part of all batches, epoch after epoch, without an end."""
    for epoch in count(first_epoch):
        yield from _training(samples, order.training_order(index, rows, seed, epoch), batch_size)


def _training(samples: Samples, rows: Rows, batch_size: int) -> Iterator[Taken]:
    """This rank's contiguous share of each global batch of `rows`."""
    here = world.current()
    for start, stop in order.step_slices(len(rows), batch_size):
        first, last = order.split(stop - start, [1] * here.size)[here.rank]
        weight = (last - first) * here.size / (stop - start)
        if first == last:  # Keras has no empty batch: a sample that weighs nothing
            first = min(first, stop - start - 1)
            last = first + 1
        batch = samples.gather(rows[start + first : start + last])
        yield batch.images, batch.labels, np.full(last - first, weight, np.float32)


def _evaluation(samples: Samples, rows: Rows, images: int) -> Iterator[Taken]:
    """All of `rows`, in batches of so many images."""
    for start, stop in order.step_slices(len(rows), images):
        batch = samples.gather(rows[start:stop])
        yield batch.images, batch.labels, np.ones(stop - start, np.float32)


def _dataset(
    make: Callable[[], Iterator[Taken]], steps: int, index: Index, normal: Normalisation
) -> tf.data.Dataset:
    """The pipeline of so many batches."""
    signature = (
        tf.TensorSpec((None, *index.image_shape), tf.uint8),
        tf.TensorSpec((None,), tf.int64),
        tf.TensorSpec((None,), tf.float32),
    )
    mean, std = (np.asarray(each, np.float32) for each in normal)

    def prepare(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (tf.cast(images, tf.float32) / 255 - mean) / std, labels, weights

    made = tf.data.Dataset.from_generator(make, output_signature=signature)
    counted = made.apply(tf.data.experimental.assert_cardinality(steps))
    return counted.map(prepare).prefetch(AHEAD)
