"""The order of samples for a DataLoader of the user's own data set."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sized
from itertools import accumulate

import numpy as np
from torch.utils.data import Sampler

from hvdtrain.data import order
from hvdtrain.errors import CheckFailed, UsageError
from hvdtrain.torch import state as states
from hvdtrain.torch.loader import shares_of


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
    used = count - count % batch_size if drop_last else count
    if not used:
        raise UsageError(
            f"{count} samples give no batch of {batch_size}: use a smaller batch_size, or more "
            "samples"
        )
    return BatchOrder(count, used, batch_size, shuffle, seed)


class BatchOrder(Sampler[list[int]]):
    """The batches that `sampler` returns, as lists of indices.

    Attributes:
        used: samples of an epoch.
        source: name of the order, by which a checkpoint knows the position in it.
    """

    def __init__(self, count: int, used: int, batch_size: int, shuffle: bool, seed: int) -> None:
        self.count, self.used, self.batch_size = count, used, batch_size
        self.shuffle, self.seed = shuffle, seed
        self.source = f"a data set of {count} samples (seed {seed})"
        self._end = 0  # position at the end of the epoch that is being trained
        self._start = 0  # position at the start of this iteration
        self._sizes: list[tuple[int, int]] = []  # of its batches: on this rank, and on all
        self._ends: list[int] = []  # samples of all batches up to each
        self._read = 0  # batches that the DataLoader has read, maybe ahead of the loop
        # Per place of a prepared model: a batch of a GAN has backwards and steps of both models.
        self._seen: Counter[int] = Counter()  # batches of its backwards
        self._stepped: Counter[int] = Counter()  # batches of its steps
        self._samples: Counter[int] = Counter()  # of its steps

    @property
    def position(self) -> int:
        """Samples that steps have consumed, over all epochs and ranks."""
        self.settle()
        return states.current().position(self.source)

    def settle(self) -> None:
        """Set the position to the end of an epoch whose batches have all been taken."""
        seen = min(self._read, max(self._seen.values(), default=0))
        if self._sizes and seen >= len(self._sizes):  # the last one may be without a step
            positions = states.current().positions
            positions[self.source] = max(positions.get(self.source, 0), self._end)

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
        return self._train() if self.shuffle else self._evaluate()

    def _train(self) -> Iterator[list[int]]:
        state = states.current()
        epoch, offset = order.locate(self.position, self.used)
        name = f"samples {self.count}"
        rows = order.epoch_order(
            np.arange(self.count, dtype=np.int64), name, self.seed, epoch, 1, self.count
        )
        slices = order.step_slices(self.used, self.batch_size, offset)
        shares = shares_of(slices, state.place.rank, state.place.size)
        self._sizes = [
            (count, stop - start) for (count, _), (start, stop) in zip(shares, slices, strict=True)
        ]
        self._ends = list(accumulate(stop - start for start, stop in slices))
        self._start, self._end = epoch * self.used + offset, (epoch + 1) * self.used
        self._read = 0
        self._seen.clear()
        self._stepped.clear()
        self._samples.clear()
        state.sampler = self
        for _, (first, last) in shares:
            self._read += 1
            yield rows[first:last].tolist()

    def _evaluate(self) -> Iterator[list[int]]:
        rows = self._evaluation()
        for start, stop in order.step_slices(len(rows), self._images):
            yield list(rows[start:stop])

    def _evaluation(self) -> range:
        place = states.current().place
        first, last = order.split(self.used, [1] * place.size)[place.rank]
        return range(first, last)

    @property
    def _images(self) -> int:
        """Samples of a batch for evaluation."""
        return -(-self.batch_size // states.current().place.size)

    def size_of_next(self, samples: int, model: int) -> int:
        """Return the samples of the next batch that count, out of `samples`; note the batch."""
        self._seen[model] += 1
        place = self._place(model)
        is_placeholder = place < len(self._sizes) and self._sizes[place][0] == 0
        return 0 if is_placeholder and samples == 1 else samples

    def _place(self, model: int) -> int:
        """Return the number of the batch of the last backward of a model, from 0."""
        return max(0, min(self._seen[model], self._read) - 1)

    def check_total(self, total: int, model: int) -> None:
        """Compare the samples of all ranks in this batch with what the sampler gave them.

        Raises:
            CheckFailed: if they differ in an epoch that has placeholders.
        """
        place = self._place(model)
        if not any(total < states.current().place.size for _, total in self._sizes):
            return
        expected = self._sizes[place][1] if place < len(self._sizes) else 0
        if total != expected:
            raise CheckFailed(
                f"the ranks trained on {total} samples in a batch of {expected}, and the last "
                "batch of the epoch has fewer samples than there are ranks: run one backward per "
                "batch of the DataLoader, or use drop_last=True"
            )

    def advance(self, batches: int, samples: int, model: int) -> None:
        """Note that the weights of a model have been updated with more backwards, and samples."""
        self._stepped[model] += batches
        self._samples[model] += samples
        # A batch may be cut for several backwards, or go into several of the same samples.
        done = max(
            min(count, bisect_left(self._ends, self._samples[place]) + 1)
            for place, count in self._stepped.items()
        )
        done = min(done, self._read, len(self._ends))
        states.current().positions[self.source] = self._start + self._ends[done - 1]
