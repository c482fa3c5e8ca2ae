"""What a rank reads for a step: the images of its first stage, the labels of its last."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.augment import crop_flip, cutout
from hvdtrain.data.shards import Batch, Index, Samples
from hvdtrain.parallel.cut import Range
from hvdtrain.training.setup import Session

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Feed:
    """Images uint8 [n, H, W, C] with their sample ids, and labels int64 [m] of other samples.

    n is 0 on ranks without the first stage, m on ranks without the last.
    """

    images: np.ndarray
    ids: Rows
    labels: Rows


class Feeder:
    """Reads feeds from a split; stands in for it in a `Loader`.

    A request is the rows whose images, and the rows whose labels this rank needs.
    """

    def __init__(self, samples: Samples, augment: Callable[[Batch], Batch] | None = None) -> None:
        self.samples, self.augment = samples, augment

    def gather(self, request: tuple[Rows, Rows]) -> Feed:
        """Read one step's feed; rows of a rank that needs both are read once."""
        for_images, for_labels = request
        if not len(for_images):
            empty = np.empty((0, *self.samples.index.image_shape), np.uint8)
            return Feed(empty, for_images, self.samples.labels(for_labels))
        batch = self.samples.gather(for_images)
        if self.augment is not None:
            batch = self.augment(batch)
        is_same = np.array_equal(for_images, for_labels)
        labels = batch.labels if is_same else self.samples.labels(for_labels)
        return Feed(batch.images, batch.ids, labels)


def epoch_rows(session: Session, epoch: int) -> Rows:
    """The training samples of an epoch in the order of use."""
    return order.training_order(session.index, session.train_rows, session.config.seed, epoch)


def augmentation(config: TrainConfig, index: Index, epoch: int) -> Callable[[Batch], Batch] | None:
    """What an epoch's batches go through, if anything."""
    if config.augment == "none" and config.cutout is None:
        return None
    blank, _ = index.normalisation(config.normalise)
    fill = np.round(255 * np.asarray(blank)).astype(np.uint8)

    def augment(batch: Batch) -> Batch:
        images = batch.images
        if config.augment == "crop-flip":
            images = crop_flip(images, batch.ids, config.seed, epoch)
        if config.cutout is not None:
            cutout(images, batch.ids, config.seed, epoch, config.cutout, fill)
        return Batch(images, batch.labels, batch.ids)

    return augment


def requests(
    session: Session, rows: Rows, slices: Iterable[Range], is_training: bool
) -> Iterator[tuple[Rows, Rows]]:
    """What this rank reads for each global batch, a range of `rows`."""
    rank, last = session.world.rank, session.plan.last
    for start, stop in slices:
        parts, batch = session.cut(stop - start, is_training).parts, rows[start:stop]
        yield taken(batch, parts[0].get(rank, ())), taken(batch, parts[last].get(rank, ()))


def taken(batch: np.ndarray, ranges: Iterable[Range]) -> np.ndarray:
    """The samples of a batch that lie in `ranges`, which may be none."""
    return np.concatenate([batch[:0], *(batch[first:last] for first, last in ranges)])
