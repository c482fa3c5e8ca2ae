"""The order of samples, as pure functions of numbers without files, ranks or state.

The global order of an epoch is a function of (index hash, seed, epoch) alone. Ranks, replicas,
micro-batches and resuming only cut it into pieces, so each epoch sees each sample exactly once
however it is cut.

Random keys are raw bits of Philox (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011), keyed by SHA-256, and orders are stable sorts by those keys: nothing depends on how a
version of NumPy shuffles.

A loader prepares batches in that order in advance, in one background thread.
"""

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.index import Index
from hvdtrain.errors import UsageError

Rows = NDArray[np.int64]
Range = tuple[int, int]  # [start, stop)

_WINDOW_BYTES = 256 * 2**20


def window_rows(index: Index) -> int:
    """Return the size in samples of the windows of an epoch's shuffle: 256 MiB of stored images.

    It is at least 1, and a function of the index alone, so that memory and ranks never change the
    order.
    """
    return max(1, _WINDOW_BYTES // index.image_bytes)


def holdout(count: int, fraction: float, index_hash: str, seed: int) -> tuple[Rows, Rows]:
    """Return the rows of `range(count)` to train on and the held-out rows, int64 and ascending.

    The whole number nearest to fraction * count is held out, at least one and not all if the
    fraction is above 0. Raises UsageError for a fraction outside [0, 1), or a single sample.
    """
    if not 0 <= fraction < 1:
        raise UsageError(f"holdout is {fraction}: it must be at least 0 and below 1")
    if fraction > 0 and count < 2:
        raise UsageError(f"cannot hold out a part of {count} sample(s): set holdout to 0")
    if not fraction:
        return np.arange(count, dtype=np.int64), np.empty(0, np.int64)
    held = min(max(1, int(fraction * count + 0.5)), count - 1)
    order = shuffled(np.arange(count, dtype=np.int64), f"holdout {index_hash} {seed}")
    return np.sort(order[held:]), np.sort(order[:held])


def training_order(index: Index, rows: Rows, seed: int, epoch: int) -> Rows:
    """Return the given rows of the train split in the order of an epoch, as `epoch_order` does."""
    chunk_rows = index.splits["train"].chunk_rows
    return epoch_order(rows, index.hash, seed, epoch, chunk_rows, window_rows(index))


def epoch_order(
    rows: Rows, index_hash: str, seed: int, epoch: int, chunk_rows: int, window_rows: int
) -> Rows:
    """Return the rows of one epoch in the order of use, each exactly once: int64 [len(rows)].

    `rows` are ascending row numbers of a split stored in chunks of `chunk_rows`. If a window
    holds them all they are shuffled fully. Otherwise the chunks are shuffled, and then the
    samples inside windows of whole chunks of at most `window_rows` samples (at least one chunk).
    Reading in this order reads each chunk once and keeps one window in memory.
    """
    name = f"epoch {index_hash} {seed} {epoch}"
    if window_rows >= len(rows):
        return shuffled(rows, name)
    starts = np.flatnonzero(np.diff(rows // chunk_rows, prepend=-1))
    ends = np.append(starts[1:], len(rows))
    places = shuffled(np.arange(len(starts), dtype=np.int64), f"chunks of {name}")
    keys = _keys(len(rows), name)
    order, filled = np.empty_like(rows), 0
    for window in _windows(places, ends - starts, window_rows):
        # By ascending place, since the sort by random keys is stable.
        inside = np.concatenate([np.arange(starts[i], ends[i]) for i in np.sort(window)])
        inside = inside[np.argsort(keys[inside], kind="stable")]
        order[filled : filled + len(inside)] = rows[inside]
        filled += len(inside)
    return order


def _windows(places: Rows, sizes: Rows, window_rows: int) -> Iterator[Rows]:
    """Yield the chunks in windows of at most `window_rows` samples, or of one chunk."""
    start, filled = 0, 0
    for number, size in enumerate(sizes[places].tolist()):
        if filled and filled + size > window_rows:
            yield places[start:number]
            start, filled = number, 0
        filled += size
    yield places[start:]


def shuffled(rows: Rows, name: str) -> Rows:
    """Return the rows in a random order that depends on `name` and their number alone."""
    return rows[np.argsort(_keys(len(rows), name), kind="stable")]


def _keys(count: int, name: str) -> NDArray[np.uint64]:
    """Return `count` random 64-bit numbers that depend on `name` alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(count)


def locate(position: int, epoch_length: int) -> tuple[int, int]:
    """Return the epoch of a position in training, and the offset in it, in samples consumed."""
    return divmod(position, epoch_length)


def step_slices(epoch_length: int, batch_size: int, start_offset: int = 0) -> list[Range]:
    """Return the global batches of an epoch from `start_offset` on, with the uneven last one."""
    if batch_size < 1:
        raise UsageError(f"the batch size is {batch_size}: it must be at least 1")
    starts = range(start_offset, epoch_length, batch_size)
    return [(start, min(start + batch_size, epoch_length)) for start in starts]


def split(count: int, shares: Sequence[int]) -> list[Range]:
    """Split `range(count)` into one contiguous range per share, by cumulative rounding.

    The ranges are proportional to the shares. Ranges of equal shares differ by at most one; a
    share of 0 gets an empty range. Raises UsageError for a negative share or if all are 0.
    """
    total = sum(shares)
    if total < 1 or min(shares) < 0:
        raise UsageError(f"shares {list(shares)}: they must be at least 0 and not all 0")
    # Whole numbers only: the nearest to count * sum / total, the same on every machine.
    ends = [(2 * count * part + total) // (2 * total) for part in accumulate(shares, initial=0)]
    return list(pairwise(ends))


def microbatches(count: int, requested: int, shares: Sequence[int]) -> int:
    """Return the number of micro-batches for a global batch of `count` samples.

    It is the largest number up to `requested` at which each replica with a share above 0 has a
    sample in each micro-batch; 1 if there is no such number.
    """
    if requested < 1:
        raise UsageError(f"{requested} micro-batches: there must be at least 1")
    for number in range(min(requested, count), 1, -1):
        smallest, uneven = divmod(count, number)
        sizes = {smallest, smallest + 1} if uneven else {smallest}
        parts = [part for size in sizes for part in zip(split(size, shares), shares, strict=True)]
        if all(stop > start for (start, stop), share in parts if share > 0):
            return number
    return 1


def share_rows(
    start: int, stop: int, microbatches: int, shares: Sequence[int], replica: int
) -> list[Range]:
    """Return the part of the global batch [start, stop) for `replica`: one range per micro-batch.

    Micro-batch k is the k-th contiguous slice of the batch, split evenly, and replicas take
    contiguous shares of it. Positions are those of the epoch's order.
    """
    return replica_rows(start, stop, microbatches, shares)[replica]


def replica_rows(
    start: int, stop: int, microbatches: int, shares: Sequence[int]
) -> list[list[Range]]:
    """Return `share_rows` of all replicas, in their order."""
    ranges: list[list[Range]] = [[] for _ in shares]
    for first, last in split(stop - start, [1] * microbatches):
        for replica_ranges, (low, high) in zip(ranges, split(last - first, shares), strict=True):
            replica_ranges.append((start + first + low, start + first + high))
    return ranges


Request = TypeVar("Request")
Item = TypeVar("Item")
_Request = TypeVar("_Request", contravariant=True)
_Made = TypeVar("_Made", covariant=True)


class Source(Protocol[_Request, _Made]):
    """A source of batches, such as `Samples`, whose requests are arrays of rows."""

    def gather(self, request: _Request, /) -> _Made:
        """Read one batch."""


class _End:
    """The last item of the queue, with the error that ended the thread, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Loader(Generic[Request, Item]):
    """An iterator over one batch per request, in the order of the requests.

    The source must accept the requests; `transform` is applied to each batch in the background
    thread. At most `prefetch` batches are held ready. An error in the thread is raised in the
    consumer, in place of the batch that failed. The thread ends after the last request or with
    close(), whichever comes first; use it in a `with` statement.

    Attributes:
        last_wait: seconds that the consumer waited for the last batch.
    """

    def __init__(
        self,
        source: Source[Request, Item],
        requests: Iterable[Request],
        transform: Callable[[Item], Item] | None = None,
        prefetch: int = 2,
    ) -> None:
        if prefetch < 1:
            raise UsageError(f"prefetch is {prefetch}: it must be at least 1")
        # Two queues in C form one with a limit: a step then needs none of Python's own locks.
        self._made: queue.SimpleQueue[Item | _End] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[bool] = queue.SimpleQueue()
        for _ in range(prefetch):
            self._room.put(True)
        self._ended = False
        self.last_wait = 0.0
        self._thread = threading.Thread(
            target=_produce,
            args=(source, iter(requests), transform, self._made, self._room),
            name="hvdtrain-loader",
            daemon=True,
        )
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        if self._ended:
            raise StopIteration
        start = time.perf_counter()
        item = self._made.get()
        self.last_wait = time.perf_counter() - start
        if not isinstance(item, _End):
            self._room.put(True)
            return item
        self.close()
        if item.error is not None:
            raise item.error
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread after its current batch, and drop the prepared batches."""
        self._ended = True
        while not self._room.empty():
            with suppress(queue.Empty):  # the thread may be faster
                self._room.get_nowait()
        self._room.put(False)
        self._thread.join()
        self._made = queue.SimpleQueue()


def _produce(
    source: Source[Request, Item],
    requests: Iterator[Request],
    transform: Callable[[Item], Item] | None,
    made: "queue.SimpleQueue[Item | _End]",
    room: "queue.SimpleQueue[bool]",
) -> None:
    """Make one batch per True from `room`, and stop at a False."""
    error: BaseException | None = None
    try:
        for request in requests:
            if not room.get():
                return
            batch = source.gather(request)
            made.put(batch if transform is None else transform(batch))
    except BaseException as raised:  # any error is raised in the consumer
        error = raised
    made.put(_End(error))
