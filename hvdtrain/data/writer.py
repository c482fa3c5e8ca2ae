"""Writing a packed data set: into a temporary folder, with renames at the end, the index last.

A source with a key is packed on after a kill: the temporary folder holds the finished shards and a
journal of them.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.index import FILES_VERSION, FORMAT_VERSION, Index, Resize, Shard, Split
from hvdtrain.data.partial import Done, Journal, partial_folder, publish, write_file
from hvdtrain.data.shardfile import Batch, chunk_rows, encode_shard
from hvdtrain.errors import DataError, UsageError

_LARGEST_SHARD_MB = 2048
_BLOCK_ROWS = 1024  # images counted at a time for the mean

Progress = Callable[[int], None]  # samples read so far, of all splits


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive samples of a source.

    Attributes:
        images: uint8 [n, height, width, channels], or the bytes of image files [n].
        labels: whole numbers [n].
        places: int64 [n], ascending: which samples of the source these are.
        counts: how many pixels have each value, uint32 [n, channels, 256]; None: count them here.
    """

    images: NDArray[Any]
    labels: NDArray[np.integer]
    places: NDArray[np.int64]
    counts: NDArray[np.uint32] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, start: int, stop: int) -> "Block":
        """Return samples [start, stop) of the block."""
        rows = slice(start, stop)
        counts = None if self.counts is None else self.counts[rows]
        return Block(self.images[rows], self.labels[rows], self.places[rows], counts)


@dataclass(frozen=True)
class Source:
    """A split to write, of `count` samples; `read(start, stop)` returns a range of them.

    Images are uint8 [n, height, width, channels], labels are whole numbers [n].

    Attributes:
        broken: place and description of each sample that was left out so far.
    """

    count: int
    read: Callable[[int, int], tuple[NDArray[np.uint8], NDArray[np.integer]]]
    broken: list[tuple[int, str]] = field(default_factory=list)

    def blocks(self, start: int, rows: int) -> Iterator[Block]:
        """Yield the samples from `start` on, in blocks of `rows`."""
        for first in range(start, self.count, rows):
            last = min(first + rows, self.count)
            images, labels = self.read(first, last)
            yield Block(images, labels, np.arange(first, last, dtype=np.int64))


@dataclass(frozen=True)
class Layout:
    """The form of a data set.

    Attributes:
        resize: how image files are resized when they are decoded; None for pixels.
        file_bytes: average size of an image file.
    """

    image_shape: tuple[int, int, int]
    resize: Resize | None = None
    file_bytes: int = 0
    shard_mb: int = 64

    @property
    def image_bytes(self) -> int:
        """Bytes of one stored image, on average."""
        return math.prod(self.image_shape) if self.resize is None else max(1, self.file_bytes)

    @property
    def chunk_rows(self) -> int:
        """Samples per chunk."""
        return chunk_rows(self.image_bytes)

    @property
    def shard_rows(self) -> int:
        """Samples per shard: whole chunks."""
        rows = self.chunk_rows
        return rows * max(1, self.shard_mb * 2**20 // (self.image_bytes * rows))


def write_sources(
    destination: Path | str,
    sources: Mapping[str, Any],
    layout: Layout,
    class_names: Sequence[str] | None,
    notes: Sequence[str] = (),
    key: str | None = None,
    progress: Progress | None = None,
) -> Index:
    """Write the splits `train` and `test` into the folder `destination`; return its index.

    Shards hold at most `shard_mb` MiB of images (at least one chunk). Sample ids start at 0 and
    continue through the splits. Memory is bounded by a few shards.

    Args:
        sources: by split, a `Source` or an object with its `blocks` and `broken`.
        class_names: None for `class 0`, `class 1` and so on up to the largest label.
        key: identity of the sources and of all options; what a killed process with the same key
            has written is kept. None if the sources cannot be read again from the middle.
        progress: is called with the number of samples that were read.

    Raises:
        UsageError: for a shard size out of range.
        DataError: if a split is empty, a label has no class, or the destination holds a data set
            already or cannot be written: then no written file is left behind.
    """
    if not 1 <= layout.shard_mb <= _LARGEST_SHARD_MB:
        raise UsageError(f"shards of {layout.shard_mb} MiB: choose from 1 to {_LARGEST_SHARD_MB}")
    destination = Path(destination)
    with partial_folder(destination, key) as journal:
        splits: dict[str, Split] = {}
        for name, source in sources.items():
            writer = _SplitWriter(journal, name, layout, class_names, progress)
            splits[name] = writer.write(source, sum(split.count for split in splits.values()))
        mean, std = mean_and_std(journal.counts(layout.image_shape[2]))
        broken = {name: len(source.broken) for name, source in sources.items()}
        left_out = [f"{name}: {_broken_files(count)}" for name, count in broken.items() if count]
        index = Index(
            folder=destination,
            format_version=FORMAT_VERSION if layout.resize is None else FILES_VERSION,
            splits=splits,
            class_names=tuple(class_names or _numbered(journal.largest_label)),
            image_shape=layout.image_shape,
            mean=mean,
            std=std,
            notes=(*notes, *left_out),
            resize=layout.resize,
        )
        publish(journal.folder, destination, index)
    return index


def _broken_files(count: int) -> str:
    return f"{count:,} broken file{'' if count == 1 else 's'} left out"


def _numbered(largest: int) -> list[str]:
    return [f"class {number}" for number in range(largest + 1)]


@dataclass
class _SplitWriter:
    """Writes the shards of one split."""

    journal: Journal
    name: str
    layout: Layout
    class_names: Sequence[str] | None
    progress: Progress | None

    def write(self, source: Any, first_id: int) -> Split:
        """Write the samples of a source that the journal does not hold yet."""
        done = self.journal.splits.setdefault(self.name, Done())
        source.broken[:] = done.broken
        rows = self.layout.chunk_rows
        blocks = self._watched(source.blocks(done.next, rows))
        for shard in _whole_shards(blocks, self.layout.shard_rows):
            self._check_labels(shard)
            start = first_id + sum(earlier.count for earlier in done.shards)
            done.shards.append(self._write_shard(shard, len(done.shards), start))
            done.next = int(shard.places[-1]) + 1
            done.broken = [fault for fault in source.broken if fault[0] < done.next]
            self.journal.save()
        count = sum(shard.count for shard in done.shards)
        if not count:
            raise DataError(
                f"the split `{self.name}` has no images: a data set needs at least one in `train` "
                "and one in `test`"
            )
        return Split(self.name, count, tuple(done.shards), rows)

    def _watched(self, blocks: Iterator[Block]) -> Iterator[Block]:
        before = sum(done.next for name, done in self.journal.splits.items() if name != self.name)
        for block in blocks:
            yield block
            if self.progress is not None and len(block):
                self.progress(before + int(block.places[-1]) + 1)

    def _check_labels(self, block: Block) -> None:
        smallest, largest = int(block.labels.min()), int(block.labels.max())
        classes = None if self.class_names is None else len(self.class_names)
        if smallest >= 0 and (classes is None or largest < classes):
            self.journal.largest_label = max(self.journal.largest_label, largest)
            return
        wrong = smallest if smallest < 0 else largest
        sample = int(block.places[np.flatnonzero(block.labels == wrong)[0]])
        limit = "at least 0" if classes is None else f"0 to {classes - 1}"
        raise DataError(f"sample {sample} of `{self.name}` has label {wrong}: labels are {limit}")

    def _write_shard(self, block: Block, number: int, first_id: int) -> Shard:
        if self.name == "train":
            self.journal.add_counts(_counts(block, self.layout.image_shape[2]))
        ids = np.arange(first_id, first_id + len(block), dtype=np.int64)
        samples = Batch(block.images, block.labels.astype(np.int32), ids)
        content = encode_shard(samples, self.layout.chunk_rows)
        file = f"{self.name}-{number:05d}.h5"
        write_file(self.journal.folder / file, content)
        return Shard(file, len(block), len(content), hashlib.sha256(content).hexdigest())


def _whole_shards(blocks: Iterator[Block], rows: int) -> Iterator[Block]:
    """Yield the samples in blocks of `rows`, and the rest in a smaller one."""
    waiting: list[Block] = []
    count = 0
    for block in blocks:
        start = 0
        while count + len(block) - start >= rows:
            stop = start + rows - count
            yield _joined([*waiting, block.part(start, stop)])
            waiting, count, start = [], 0, stop
        if start < len(block):
            waiting.append(block.part(start, len(block)))
            count += len(block) - start
    if count:
        yield _joined(waiting)


def _joined(blocks: list[Block]) -> Block:
    counts = [block.counts for block in blocks if block.counts is not None]
    return Block(
        np.concatenate([block.images for block in blocks]),
        np.concatenate([block.labels for block in blocks]),
        np.concatenate([block.places for block in blocks]),
        np.concatenate(counts) if counts else None,
    )


def _counts(block: Block, channels: int) -> NDArray[np.int64]:
    if block.counts is not None:
        return np.asarray(block.counts.sum(axis=0, dtype=np.int64))
    histogram = np.zeros((channels, 256), np.int64)
    count_values(block.images, histogram)
    return histogram


def count_values(images: NDArray[np.uint8], histogram: NDArray[np.int64]) -> None:
    """Add the counts of each value 0..255 in each channel to `histogram` [channels, 256]."""
    for start in range(0, len(images), _BLOCK_ROWS):
        block = images[start : start + _BLOCK_ROWS]
        for channel in range(len(histogram)):
            values = np.ascontiguousarray(block[..., channel]).reshape(-1)
            histogram[channel] += np.bincount(values, minlength=256)


def mean_and_std(histogram: NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of pixels in 0..1, from integer sums."""
    mean, std = [], []
    for counts in histogram.tolist():
        pixels = sum(counts)
        first = sum(value * count for value, count in enumerate(counts))
        second = sum(value * value * count for value, count in enumerate(counts))
        variance = (pixels * second - first * first) / (pixels * 255) ** 2
        mean.append(first / (pixels * 255))
        std.append(math.sqrt(variance) if variance > 0 else 1.0)
    return tuple(mean), tuple(std)
