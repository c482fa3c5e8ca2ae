"""Writing a packed data set: into a temporary folder, with renames at the end, the index last.

The temporary folder is locked while a process writes into it, so that a second one is refused. A
source with a key resumes after a kill: a record beside each finished shard says what it holds.
"""

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from hvdtrain.data.index import (
    FILES_VERSION,
    FORMAT_VERSION,
    INDEX_FILE,
    REFERENCE_VERSION,
    SPLITS,
    TARGET_TYPES,
    Index,
    Reference,
    Resize,
    Shard,
    Split,
    TargetForm,
)
from hvdtrain.data.shards import Batch, chunk_rows, encode_shard
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files

PARTIAL_FOLDER = ".partial"
LOCK = "lock"

_LARGEST_SHARD_MB = 2048
DIGEST_BYTES = 8  # any two of a million images have the same one with a chance of 3e-8
_BLOCK_ROWS = 1024  # images counted at a time for the mean

Progress = Callable[[int], None]  # samples read so far, of all splits
Fault = tuple[int, str]  # place and description of a sample that was left out


class Resumable(DataError):
    """A fault of the machine, not of the source: what is written so far is kept to resume."""


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive samples of a source.

    Attributes:
        images: [n, height, width, channels], or the bytes of image files [n].
        labels: whole numbers [n], or targets [n, ...].
        places: int64 [n], ascending: which samples of the source these are.
        counts: how many pixels have each value, uint32 [n, channels, 256]; None: count them here.
    """

    images: NDArray[Any]
    labels: NDArray[Any]
    places: NDArray[np.int64]
    counts: NDArray[np.uint32] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, rows: slice) -> "Block":
        """Return some of the samples."""
        counts = None if self.counts is None else self.counts[rows]
        return Block(self.images[rows], self.labels[rows], self.places[rows], counts)


@dataclass(frozen=True)
class Source:
    """A split to write.

    Attributes:
        blocks: yields the samples from a place on, in blocks of any size.
        broken: the samples that `blocks` left out so far.
    """

    blocks: Callable[[int], Iterable[Block]]
    broken: list[Fault] = field(default_factory=list)


def in_order(parts: Iterable[tuple[NDArray[Any], NDArray[Any]]]) -> Source:
    """Return a source that is read once, of parts: images [n, height, width, channels], labels."""

    def blocks(start: int) -> Iterator[Block]:
        for images, labels in parts:
            stop = start + len(labels)
            yield Block(images, labels, np.arange(start, stop, dtype=np.int64))
            start = stop

    return Source(blocks)


@dataclass(frozen=True)
class Layout:
    """The form of a data set.

    Attributes:
        resize: how image files are resized when they are decoded; None for pixels.
        file_bytes: average size of an image file.
        targets: the form of targets that are not class labels.
        reference: the file that keeps the images; None to store them.
        rows: of `reference`, by split, in the order of the samples.
    """

    image_shape: tuple[int, int, int]
    resize: Resize | None = None
    file_bytes: int = 0
    shard_mb: int = 64
    targets: TargetForm | None = None
    image_dtype: str = "uint8"
    reference: Reference | None = None
    rows: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    @property
    def format_version(self) -> int:
        """Return the version of the format that has such data sets."""
        if self.reference is not None:
            return REFERENCE_VERSION
        return FORMAT_VERSION if self.resize is None else FILES_VERSION

    @property
    def image_bytes(self) -> int:
        """Bytes of one stored image, on average."""
        if self.resize is not None:
            return max(1, self.file_bytes)
        return math.prod(self.image_shape) * TARGET_TYPES[self.image_dtype]

    @property
    def chunk_rows(self) -> int:
        """Samples per chunk."""
        return chunk_rows(self.image_bytes)

    @property
    def shard_rows(self) -> int:
        """Samples per shard: whole chunks."""
        rows = self.chunk_rows
        return rows * max(1, self.shard_mb * 2**20 // (self.image_bytes * rows))


@dataclass
class _Finished:
    """A shard in the temporary folder.

    Attributes:
        key: identity of the sources and options.
        first_id: id of its first sample.
        next: place in the source of the first sample after it.
        broken: the samples left out since the shard before.
        counts: how many pixels have each value, [channels][256], or the moments of other numbers
            (`moments`); empty outside the train split.
        digests: of the images, DIGEST_BYTES each, in hexadecimal.
    """

    key: str | None
    shard: Shard
    first_id: int
    next: int
    largest_label: int
    broken: list[Fault]
    counts: list[list[float]]
    digests: str = ""


def write_sources(
    destination: Path | str,
    sources: Mapping[str, Source],
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
    _check_free(destination)
    with _partial_folder(destination, key) as finished:
        _check_free(destination)  # another process may have ended meanwhile
        writer = _Writer(destination, key, layout, class_names, progress, finished)
        splits = {name: writer.write(name, source) for name, source in sources.items()}
        mean, std = mean_and_std([np.array(shard.counts) for shard in finished["train"]])
        if class_names is None and layout.targets is None:
            largest = max(shard.largest_label for shards in finished.values() for shard in shards)
            class_names = [f"class {number}" for number in range(largest + 1)]
        left_out = [
            f"{name}: {count:,} broken file{'' if count == 1 else 's'} left out"
            for name, source in sources.items()
            if (count := len(source.broken))
        ]
        index = Index(
            folder=destination,
            format_version=layout.format_version,
            splits=splits,
            class_names=tuple(class_names or ()),
            image_shape=layout.image_shape,
            mean=mean,
            std=std,
            notes=(*notes, *left_out, *duplicates(finished)),
            resize=layout.resize,
            targets=layout.targets,
            image_dtype=layout.image_dtype,
            reference=layout.reference,
        )
        _publish(destination, index)
    return index


@dataclass
class _Writer:
    """Writes shards into the temporary folder of a destination."""

    destination: Path
    key: str | None
    layout: Layout
    class_names: Sequence[str] | None
    progress: Progress | None
    finished: dict[str, list[_Finished]]

    def write(self, name: str, source: Source) -> Split:
        """Write the samples of a split that no finished shard holds."""
        done = self.finished[name]
        source.broken[:] = [fault for shard in done for fault in shard.broken]
        start = done[-1].next if done else 0
        before = sum(shards[-1].next for shards in self.finished.values() if shards) - start

        def blocks() -> Iterator[Block]:
            for block in source.blocks(start):
                yield block
                if self.progress is not None:
                    self.progress(before + int(block.places[-1]) + 1)

        for block in _whole_shards(blocks(), self.layout.shard_rows):
            done.append(self._write_shard(name, block, source.broken))
        count = sum(shard.shard.count for shard in done)
        if not count:
            raise DataError(
                f"the split `{name}` has no images: a data set needs at least one in `train` "
                "and one in `test`"
            )
        return Split(name, count, tuple(shard.shard for shard in done), self.layout.chunk_rows)

    def _write_shard(self, name: str, block: Block, broken: list[Fault]) -> _Finished:
        labels, largest = block.labels, 0
        if self.layout.targets is None:
            labels, largest = self._checked(name, block), int(labels.max())
        done = self.finished[name]
        first_id = sum(one.shard.count for shards in self.finished.values() for one in shards)
        ids = np.arange(first_id, first_id + len(block), dtype=np.int64)
        samples = Batch(block.images, labels, ids)
        rows = self.layout.rows[name][block.places] if self.layout.reference else None
        content = encode_shard(samples, self.layout.chunk_rows, rows)
        file = f"{name}-{len(done):05d}.h5"
        _write(self.destination, file, content)
        start, stop = done[-1].next if done else 0, int(block.places[-1]) + 1
        counts: NDArray[Any] = np.zeros((0, 256), np.int64)
        if name == "train":
            sums = block.counts
            counts = counted(block.images) if sums is None else sums.sum(axis=0, dtype=np.int64)
        finished = _Finished(
            key=self.key,
            shard=Shard(file, len(block), len(content), hashlib.sha256(content).hexdigest()),
            first_id=first_id,
            next=stop,
            largest_label=largest,
            broken=[fault for fault in broken if start <= fault[0] < stop],
            counts=counts.tolist(),
            digests=b"".join(map(_digest, block.images)).hex(),
        )
        if self.key is not None:
            record = json.dumps(asdict(finished)).encode()
            _write(self.destination, Path(file).with_suffix(".json").name, record)
        return finished

    def _checked(self, name: str, block: Block) -> NDArray[np.int32]:
        """Return class labels as they are stored; raise DataError for one without a class."""
        smallest, largest = int(block.labels.min()), int(block.labels.max())
        classes = None if self.class_names is None else len(self.class_names)
        if smallest < 0 or (classes is not None and largest >= classes):
            wrong = smallest if smallest < 0 else largest
            sample = int(block.places[np.flatnonzero(block.labels == wrong)[0]])
            limit = "at least 0" if classes is None else f"0 to {classes - 1}"
            raise DataError(f"sample {sample} of `{name}` has label {wrong}: labels are {limit}")
        return block.labels.astype(np.int32)


def _digest(image: Any) -> bytes:
    content = image if isinstance(image, bytes) else np.asarray(image).tobytes()
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def duplicates(finished: Mapping[str, Sequence[_Finished]]) -> list[str]:
    """Return notes on images that are in a split several times, or in both splits.

    Images count as the same if all their bytes are equal.
    """
    if not all(one.digests for shards in finished.values() for one in shards):
        return []  # an earlier version wrote the first shards
    different: dict[str, NDArray[np.uint64]] = {}
    lines = []
    for name, shards in finished.items():
        digests = np.frombuffer(bytes.fromhex("".join(one.digests for one in shards)), np.uint64)
        different[name] = np.unique(digests)
        if more := len(digests) - len(different[name]):
            lines.append(
                f"{name}: {more:,} image{' is a copy' if more == 1 else 's are copies'} of others"
            )
    (first, ours), (second, theirs) = different.items()
    if both := len(np.intersect1d(ours, theirs)):
        lines.append(
            f"{second}: {both:,} different image{' is' if both == 1 else 's are'} in {first}, too"
        )
    return lines


def _whole_shards(blocks: Iterator[Block], rows: int) -> Iterator[Block]:
    """Yield the samples in blocks of `rows`, and the rest in a smaller one."""
    waiting: list[Block] = []
    count = 0
    for block in blocks:
        while count + len(block) >= rows:
            yield _joined([*waiting, block.part(slice(rows - count))])
            block = block.part(slice(rows - count, None))
            waiting, count = [], 0
        waiting.append(block)
        count += len(block)
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


def counted(images: NDArray[Any]) -> NDArray[Any]:
    """Return what `mean_and_std` needs of images [n, height, width, channels].

    Of uint8 it is how many values there are of each, int64 [channels, 256]; of other numbers their
    count, mean and sum of squared deviations, fp64 [channels, 3].
    """
    channels = images.shape[-1]
    if images.dtype != np.uint8:
        values = images.reshape(-1, channels).astype(np.float64)
        mean = values.mean(axis=0)
        squares = ((values - mean) ** 2).sum(axis=0)
        return np.stack([np.full(channels, float(len(values))), mean, squares], axis=1)
    histogram = np.zeros((channels, 256), np.int64)
    for start in range(0, len(images), _BLOCK_ROWS):
        block = images[start : start + _BLOCK_ROWS]
        for channel in range(channels):
            pixels = np.ascontiguousarray(block[..., channel]).reshape(-1)
            histogram[channel] += np.bincount(pixels, minlength=256)
    return histogram


def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return what `counted` returns of all images, from those of parts, in their order."""
    whole = parts[0]
    if whole.shape[1] == 256:
        histogram: NDArray[np.int64] = np.array(parts).sum(axis=0)
        return histogram
    for part in parts[1:]:  # Chan, Golub and LeVeque, COMPSTAT 1982
        (n, mean, squares), (more, other, others) = whole.T, part.T
        both, apart = n + more, other - mean
        whole = np.stack(
            [both, mean + apart * more / both, squares + others + apart**2 * n * more / both],
            axis=1,
        )
    return whole


def mean_and_std(
    parts: Sequence[NDArray[Any]],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel, from `counted` parts.

    Those of pixels are of values in 0..1, from integer sums, so that parts of any size give the
    same.
    """
    counts_of_all = joined(parts)
    if counts_of_all.shape[1] != 256:
        n, middle, squares = counts_of_all.T
        deviations = np.sqrt(squares / n)
        deviations[deviations == 0] = 1
        return tuple(middle.tolist()), tuple(deviations.tolist())
    mean, std = [], []
    for counts in counts_of_all.tolist():
        pixels = sum(counts)
        first = sum(value * count for value, count in enumerate(counts))
        second = sum(value * value * count for value, count in enumerate(counts))
        variance = (pixels * second - first * first) / (pixels * 255) ** 2
        mean.append(first / (pixels * 255))
        std.append(math.sqrt(variance) if variance > 0 else 1.0)
    return tuple(mean), tuple(std)


def _check_free(destination: Path) -> None:
    if os.path.lexists(destination / INDEX_FILE):
        raise DataError(
            f"{destination}: holds a data set already; remove it or choose another folder"
        )


@contextmanager
def _partial_folder(destination: Path, key: str | None) -> Iterator[dict[str, list[_Finished]]]:
    """Lock a temporary folder, yield its finished shards by split, and remove it at the end.

    An interrupt (Ctrl-C) and a Resumable error leave the folder, if there is a key to resume with.

    Raises:
        DataError: if the destination cannot be written, or another process writes into it.
    """
    missing = [path for path in (destination, *destination.parents) if not path.exists()]
    partial = destination / PARTIAL_FOLDER
    lock = FileLock(partial / LOCK, timeout=0)
    is_new = is_kept = False
    try:
        destination.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            partial.mkdir()
            is_new = True
        try:
            if not is_new and not (partial / LOCK).is_file():
                raise Timeout(lock.lock_file)  # the folder is not ours, or a second old
            lock.acquire()
        except OSError as error:
            # On a disk without locks, a new folder is used without one.
            if isinstance(error, Timeout) or not is_new:
                raise DataError(
                    f"{partial}: another process is packing into this folder, or was killed while "
                    "it did; if none is running, remove the folder and try again"
                ) from None
        finished = _left_behind(destination, key)
    except FileExistsError as error:
        raise DataError(f"{destination}: is not a folder; choose another") from error
    except OSError as error:
        _remove_empty(missing)
        raise _cannot_write(destination, error) from error
    try:
        yield finished
    except BaseException as error:
        is_kept = key is not None and isinstance(error, KeyboardInterrupt | Resumable)
        raise
    finally:
        if not is_kept:
            shutil.rmtree(partial, ignore_errors=True)
            _remove_empty(missing)
        lock.release()


def _left_behind(destination: Path, key: str | None) -> dict[str, list[_Finished]]:
    """Return the first whole shards of a killed process with this key, and remove all else.

    Shards that it has renamed already are taken back.
    """
    partial = destination / PARTIAL_FOLDER
    splits: dict[str, list[_Finished]] = {name: [] for name in SPLITS}
    kept, count = {LOCK}, 0
    for name, shards in splits.items():
        # An error: the next one is missing or damaged.
        with suppress(OSError, ValueError, TypeError, KeyError):
            while True:
                record = partial / f"{name}-{len(shards):05d}.json"
                content = json.loads(record.read_text())
                content["shard"] = Shard(**content["shard"])
                content["broken"] = [(place, text) for place, text in content["broken"]]
                one = _Finished(**content)
                if key is None or (one.key, one.first_id) != (key, count):
                    break
                path = record.with_suffix(".h5")
                if not path.exists():
                    (destination / path.name).rename(path)
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != one.shard.sha256:
                        break
                shards.append(one)
                count += one.shard.count
                kept |= {record.name, path.name}
    for path in partial.iterdir():
        if path.name not in kept:
            path.unlink()
    return splits


def _remove_empty(folders: list[Path]) -> None:
    """Remove these folders, innermost first, as long as they exist and are empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _write(destination: Path, name: str, content: bytes | memoryview) -> None:
    try:
        path = destination / PARTIAL_FOLDER / name
        files.write_whole(path, lambda file: file.write(content))
    except OSError as error:
        # The message names the final path, which the user knows, not the temporary one.
        raise _cannot_write(destination / name, error) from error


def _publish(destination: Path, index: Index) -> None:
    """Write the index, and rename all files into the destination, the index last.

    Raises:
        DataError: if that fails: then none of them is left in the destination.
    """
    text = json.dumps(index.to_json(), indent=1) + "\n"
    _write(destination, INDEX_FILE, text.encode())
    shards = [shard.file for split in index.splits.values() for shard in split.shards]
    moved: list[Path] = []
    try:
        for name in (*shards, INDEX_FILE):
            (destination / PARTIAL_FOLDER / name).rename(destination / name)
            moved.append(destination / name)
        files.sync(destination)
    except BaseException as error:
        for path in reversed(moved):
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _cannot_write(destination, error) from error
        raise


def _cannot_write(path: Path, error: OSError) -> DataError:
    fixes = {
        errno.ENOSPC: "free some space or choose another folder",
        errno.EDQUOT: "free some of your quota or choose another folder",
        errno.EFBIG: "raise the limit or choose smaller shards (--shard-mb)",
    }
    fix = fixes.get(error.errno or 0, "choose another folder")
    return DataError(f"{path}: cannot be written ({error.strerror}); {fix}")
