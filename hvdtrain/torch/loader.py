"""This rank's share of each batch, in the order of training: of a packed set, or of any other."""

import reprlib
import zlib
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, from_numpy
from torch.utils.data import Dataset, Sampler

from hvdtrain.data import order
from hvdtrain.data.augment import crop_flip
from hvdtrain.data.index import Index, read_index
from hvdtrain.data.order import Loader, Range, Rows
from hvdtrain.data.shards import Batch as Stored
from hvdtrain.data.shards import Samples, open_split
from hvdtrain.engine.feed import cache_bytes, normalisation
from hvdtrain.errors import UsageError
from hvdtrain.parallel.stage import Images
from hvdtrain.torch.reading import Batch, Counted, Reading, shared
from hvdtrain.torch.start import State, current
from hvdtrain.world import World

ALONE = World("none", 0, 1, 0, 1, 1)
AUGMENTATIONS = ("none", "crop-flip")
HOLD = (list, tuple, range, np.ndarray, Tensor, Dataset)
SHORT = reprlib.Repr()
SHORT.maxother = SHORT.maxstring = 1000
Pair = tuple[Tensor, Tensor]  # images float32 [n, C, H, W], labels int64 [n]


def loader(
    folder: str | Path,
    batch_size: int,
    *,
    split: Literal["train", "val", "test"] = "train",
    seed: int = 0,
    holdout: float = 0.0,
    augment: Literal["none", "crop-flip"] = "none",
    normalise: Literal["meanstd", "unit"] = "meanstd",
    drop_last: bool = False,
) -> "PackedBatches":
    """Return batches of a packed data set: (images float32 [n, C, H, W], labels int64 [n]).

    They are on this rank's device, images in channels_last order. Iterate it once per epoch. In
    training a batch is this rank's contiguous share of a global batch, in the order of `hvdtrain
    train`, and the next iteration continues where the steps ended: with the next epoch, or after
    the last step if the loop was left early or a checkpoint was loaded. If a rank has no sample of
    a small last batch, it gets a placeholder that does not count. For "val" and "test" each
    sample comes once, on one rank.

    Args:
        folder: of `hvdtrain data pack`.
        batch_size: images per step, of all ranks together.
        split: "train", its held-out part "val", or "test".
        seed: for the order of samples, their augmentation, and the held-out part.
        holdout: fraction of the training set held out for "val".
        augment: "crop-flip" shifts and mirrors training images at random.
        normalise: "meanstd" subtracts the mean of each channel and divides by its deviation, of
            the training images; "unit" divides pixels by 255.
        drop_last: leave out the last training batch of an epoch if it is smaller than the others.

    Raises:
        UsageError: for a wrong argument, or an empty split.
        DataError: if the data set is damaged.
    """
    state = current()
    index = read_index(str(folder))
    if batch_size < 1:
        raise UsageError(f"a batch of {batch_size} images: use at least 1")
    if augment not in AUGMENTATIONS:
        raise UsageError(
            f"unknown augmentation {augment!r}: use one of {', '.join(AUGMENTATIONS)}"
        )
    rows, held = order.holdout(index.splits["train"].count, holdout, index.hash, seed)
    stored = {"train": "train", "val": "train", "test": "test"}.get(split)
    if stored is None or stored not in index.splits:
        raise UsageError(f"{folder} has no split {split!r}: use one of train, val, test")
    if split == "val" and not len(held):
        raise UsageError("split val is empty: give holdout a value, such as 0.1")
    memory = cache_bytes(state.place.local_size)
    images = Images(*normalisation(normalise, index, rows, ALONE), state.place.device, "fp32")
    test = np.arange(index.splits[stored].count)
    used = whole_batches(len(rows), batch_size) if drop_last else len(rows)
    return PackedBatches(
        index=index,
        samples=open_split(index, stored, memory),
        rows={"train": rows, "val": held, "test": test}[split],
        batch_size=batch_size,
        seed=seed,
        augment=augment,
        images=images,
        is_training=split == "train",
        used=used,
        source=f"a data set (index {index.hash[:12]}, seed {seed}, holdout {holdout:g}"
        f"{', drop_last' if drop_last else ''})",
    )


def whole_batches(count: int, batch_size: int) -> int:
    """Return the samples of the whole batches of an epoch.

    Raises:
        UsageError: if there is no whole batch.
    """
    if count < batch_size:
        raise UsageError(
            f"{count} samples give no batch of {batch_size}: use a smaller batch_size, or more "
            "samples"
        )
    return count - count % batch_size


class Ordered:
    """Batches in an order of samples, which continue where the steps ended.

    Attributes:
        used: samples of a training epoch.
        source: name of the order, by which a checkpoint knows the position in it.
    """

    used: int
    source: str

    @property
    def position(self) -> int:
        """Samples that steps have consumed, over all epochs and ranks."""
        return current().position(self.source)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is in, from 0."""
        return self.position // self.used


@dataclass(frozen=True)
class PackedBatches(Ordered):
    """The batches that `loader` returns.

    Attributes:
        rows: of the split.
        batch_size: images per step, of all ranks together.
    """

    index: Index
    samples: Samples
    rows: Rows
    batch_size: int
    seed: int
    augment: str
    images: Images
    is_training: bool
    used: int
    source: str

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.index.classes

    @property
    def image_size(self) -> int:
        """Side of an image in pixels."""
        return self.index.image_shape[0]

    def __len__(self) -> int:
        """Return the batches of a whole epoch on this rank."""
        if self.is_training:
            return -(-self.used // self.batch_size)
        return len(self._evaluation)

    def __iter__(self) -> Iterator[Pair]:
        """Yield the batches of an epoch."""
        return self._train() if self.is_training else self._evaluate()

    def _train(self) -> Iterator[Pair]:
        state = current()
        epoch, reading, ranges = open_reading(state, self.source, self.used, self.batch_size)
        rows = order.training_order(self.index, self.rows, self.seed, epoch)
        change = partial(_cropped, self.seed, epoch) if self.augment == "crop-flip" else None
        requests = [rows[first:last] for first, last in ranges]

        def pairs() -> Iterator[Pair]:
            with Loader(self.samples, requests, change) as batches:
                for batch in batches:
                    reading.read += 1
                    yield self._tensors(batch)
            for model in state.models:
                model.check_steps()
            if reading.used:  # the end of the epoch may have had no step of its own
                reading.used = reading.read
                state.note_positions(at_ends=True)

        return reading.by(pairs())

    def _evaluate(self) -> Iterator[Pair]:
        with Loader(self.samples, self._evaluation) as batches:
            for batch in batches:
                yield self._tensors(batch)

    @cached_property
    def _evaluation(self) -> list[Rows]:
        place = current().place
        first, last = order.split(len(self.rows), [1] * place.size)[place.rank]
        rows, images = self.rows[first:last], -(-self.batch_size // place.size)
        return [rows[start:stop] for start, stop in order.step_slices(len(rows), images)]

    def _tensors(self, batch: Stored) -> Pair:
        device = self.images.device
        return self.images(batch.images), from_numpy(batch.labels).to(device)


def open_reading(
    state: State, source: str, used: int, batch_size: int
) -> tuple[int, Reading, list[Range]]:
    """Start to read where the steps ended; return the epoch, and the rows of each batch in it.

    Args:
        used: samples of an epoch.
    """
    epoch, offset = order.locate(state.position(source), used)
    slices = order.step_slices(used, batch_size, offset)
    place = state.place
    batches, ranges = shared(slices, epoch * used, source, place.rank, place.size)
    reading = Reading(batches)
    state.read(reading)
    return epoch, reading, ranges


def _cropped(seed: int, epoch: int, batch: Stored) -> Stored:
    return Stored(crop_flip(batch.images, batch.ids, seed, epoch), batch.labels, batch.ids)


def sampler(
    dataset: Sized,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
) -> "BatchOrder":
    """Return the batch sampler of this rank: `DataLoader(dataset, batch_sampler=sampler(...))`.

    With `shuffle` it is for training: a batch is this rank's share of a global batch, each epoch
    has an order of its own, the same on any number of ranks, and the next iteration continues
    where the steps ended, as that of `distributed.loader`. Without it is for evaluation: each
    sample comes once, on one rank.

    Args:
        dataset: anything with a length, the same on all ranks.
        batch_size: samples per step, of all ranks together.
        seed: for the order.
        drop_last: leave out the last batch of an epoch if it is smaller than the others.

    Raises:
        UsageError: if an epoch has no batch.
    """
    count = len(dataset)
    if batch_size < 1:
        raise UsageError(f"a batch of {batch_size} samples: use at least 1")
    used = whole_batches(count, batch_size if drop_last else 1)
    return BatchOrder(count, used, batch_size, shuffle, seed, contents(dataset))


class BatchOrder(Ordered, Sampler[list[int]]):
    """The batches that `sampler` returns, as lists of indices.

    Attributes:
        contents: checksum of the data set, as far as is seen.
    """

    def __init__(
        self, count: int, used: int, batch_size: int, shuffle: bool, seed: int, contents: int
    ) -> None:
        self.contents = contents
        self.count, self.used, self.batch_size = count, used, batch_size
        self.shuffle, self.seed = shuffle, seed
        self.source = f"a data set of {count} samples (seed {seed})"

    def __len__(self) -> int:
        """Return the batches of a whole epoch on this rank."""
        if self.shuffle:
            return -(-self.used // self.batch_size)
        return -(-len(self._evaluation()) // self._images)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of an epoch."""
        current().contents = self.contents
        return self._train() if self.shuffle else self._evaluate()

    def _train(self) -> Iterator[list[int]]:
        state = current()
        epoch, reading, ranges = open_reading(state, self.source, self.used, self.batch_size)
        rows = order.epoch_order(
            np.arange(self.count, dtype=np.int64),
            *(f"samples {self.count}", self.seed, epoch, 1, self.count),
        )
        return reading.by(Counted(reading, (rows[a:b].tolist() for a, b in ranges)))

    def _evaluate(self) -> Iterator[list[int]]:
        rows = self._evaluation()
        slices = order.step_slices(len(rows), self._images)
        reading = Reading([Batch(stop - start, stop - start) for start, stop in slices])
        current().evaluation = reading
        return reading.by(Counted(reading, (list(rows[a:b]) for a, b in slices)))

    def _evaluation(self) -> range:
        place = current().place
        first, last = order.split(self.used, [1] * place.size)[place.rank]
        return range(first, last)

    @property
    def _images(self) -> int:
        """Samples of a batch for evaluation."""
        return -(-self.batch_size // current().place.size)


def contents(value: Any, depth: int = 3) -> int:
    """Return a checksum of the first and last items of a data set, as far as it holds them.

    No sample is read: that may open files which workers must open themselves.
    """
    if isinstance(value, (list, tuple, range)) or getattr(value, "ndim", None):
        text = SHORT.repr((len(value), value[0], value[-1])) if len(value) else ""
        return 0 if " at 0x" in text else zlib.crc32(text.encode())
    held = [item for item in getattr(value, "__dict__", {}).values() if isinstance(item, HOLD)]
    return zlib.crc32(repr([contents(item, depth - 1) for item in held if depth]).encode())
