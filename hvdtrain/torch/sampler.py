"""The order of samples for a DataLoader of the user's own data set."""

import reprlib
import zlib
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from hvdtrain.data import order
from hvdtrain.errors import UsageError
from hvdtrain.torch import state as states
from hvdtrain.torch.loader import open_reading, whole_batches
from hvdtrain.torch.reading import Batch, Counted, Reading

HOLD = (list, tuple, range, np.ndarray, Tensor, Dataset)
SHORT = reprlib.Repr()
SHORT.maxother = SHORT.maxstring = 1000


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


class BatchOrder(Sampler[list[int]]):
    """The batches that `sampler` returns, as lists of indices.

    Attributes:
        used: samples of an epoch.
        contents: checksum of the data set, as far as is seen.
        source: name of the order, by which a checkpoint knows the position in it.
    """

    def __init__(
        self, count: int, used: int, batch_size: int, shuffle: bool, seed: int, contents: int
    ) -> None:
        self.contents = contents
        self.count, self.used, self.batch_size = count, used, batch_size
        self.shuffle, self.seed = shuffle, seed
        self.source = f"a data set of {count} samples (seed {seed})"

    @property
    def position(self) -> int:
        """Samples that steps have consumed, over all epochs and ranks."""
        return states.current().position(self.source)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is in, from 0."""
        return self.position // self.used

    def __len__(self) -> int:
        """Return the batches of a whole epoch on this rank."""
        if self.shuffle:
            return -(-self.used // self.batch_size)
        return -(-len(self._evaluation()) // self._images)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of an epoch."""
        states.current().contents = self.contents
        return self._train() if self.shuffle else self._evaluate()

    def _train(self) -> Iterator[list[int]]:
        state = states.current()
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
        states.current().evaluation = reading
        return reading.by(Counted(reading, (list(rows[a:b]) for a, b in slices)))

    def _evaluation(self) -> range:
        place = states.current().place
        first, last = order.split(self.used, [1] * place.size)[place.rank]
        return range(first, last)

    @property
    def _images(self) -> int:
        """Samples of a batch for evaluation."""
        return -(-self.batch_size // states.current().place.size)


def contents(value: Any, depth: int = 3) -> int:
    """Return a checksum of the first and last items of a data set, as far as it holds them.

    No sample is read: that may open files which workers must open themselves.
    """
    if isinstance(value, (list, tuple, range)) or getattr(value, "ndim", None):
        text = SHORT.repr((len(value), value[0], value[-1])) if len(value) else ""
        return 0 if " at 0x" in text else zlib.crc32(text.encode())
    held = [item for item in getattr(value, "__dict__", {}).values() if isinstance(item, HOLD)]
    return zlib.crc32(repr([contents(item, depth - 1) for item in held if depth]).encode())
