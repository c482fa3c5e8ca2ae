"""Writing a packed data set: into a temporary folder, with renames at the end, the index last."""

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.index import FORMAT_VERSION, INDEX_FILE, Index, Shard, Split
from hvdtrain.data.shardfile import Batch, chunk_rows, encode_shard
from hvdtrain.errors import DataError, UsageError

PARTIAL_FOLDER = ".partial"

_LARGEST_SHARD_MB = 2048
_BLOCK_ROWS = 1024  # images counted at a time for the mean


@dataclass(frozen=True)
class Source:
    """A split to write, of `count` samples; `read(start, stop)` returns a range of them.

    Images are uint8 [n, height, width, channels], labels are whole numbers [n].
    """

    count: int
    read: Callable[[int, int], tuple[NDArray[np.uint8], NDArray[np.integer]]]


def write(
    destination: Path | str,
    sources: Mapping[str, Source],
    image_shape: tuple[int, int, int],
    class_names: Sequence[str],
    notes: Sequence[str] = (),
    shard_mb: int = 64,
) -> Index:
    """Write the splits `train` and `test` into the folder `destination`; return its index.

    Shards hold at most `shard_mb` MiB of images (at least one chunk). Sample ids start at 0 and
    continue through the splits. Memory is bounded by a few shards. Raises UsageError for a shard
    size out of range, and DataError if the destination holds a data set already or cannot be
    written: then no written file is left behind.
    """
    if not 1 <= shard_mb <= _LARGEST_SHARD_MB:
        raise UsageError(f"shards of {shard_mb} MiB: choose from 1 to {_LARGEST_SHARD_MB}")
    destination = Path(destination)
    with _partial_folder(destination) as partial:
        histogram = np.zeros((image_shape[2], 256), np.int64)
        splits, first_id = {}, 0
        for name, source in sources.items():
            counts = histogram if name == "train" else None
            splits[name] = _write_split(
                partial, name, source, image_shape, first_id, shard_mb, counts
            )
            first_id += source.count
        mean, std = mean_and_std(histogram)
        index = Index(
            folder=destination,
            format_version=FORMAT_VERSION,
            splits=splits,
            class_names=tuple(class_names),
            image_shape=image_shape,
            mean=mean,
            std=std,
            notes=tuple(notes),
        )
        text = json.dumps(index.to_json(), indent=1) + "\n"
        _write_file(partial / INDEX_FILE, text.encode())
        files = [shard.file for split in splits.values() for shard in split.shards]
        _publish(partial, destination, [*files, INDEX_FILE])
    return index


def _write_split(
    partial: Path,
    name: str,
    source: Source,
    image_shape: tuple[int, int, int],
    first_id: int,
    shard_mb: int,
    histogram: NDArray[np.int64] | None,
) -> Split:
    """Write the shards of a split, and count pixel values into `histogram` if it is given."""
    image_bytes = math.prod(image_shape)
    rows = chunk_rows(image_bytes)
    shard_rows = rows * max(1, shard_mb * 2**20 // (image_bytes * rows))
    shards = []
    for number, start in enumerate(range(0, source.count, shard_rows)):
        stop = min(start + shard_rows, source.count)
        images, labels = source.read(start, stop)
        ids = np.arange(first_id + start, first_id + stop, dtype=np.int64)
        if histogram is not None:
            count_values(images, histogram)
        content = encode_shard(Batch(images, labels.astype(np.int32), ids), rows)
        file = f"{name}-{number:05d}.h5"
        _write_file(partial / file, content)
        digest = hashlib.sha256(content).hexdigest()
        shards.append(Shard(file, stop - start, len(content), digest))
    return Split(name, source.count, tuple(shards), rows)


@contextmanager
def _partial_folder(destination: Path) -> Iterator[Path]:
    """Yield a temporary folder inside the destination, and remove it in any case."""
    if os.path.lexists(destination / INDEX_FILE):
        raise DataError(
            f"{destination}: holds a data set already; remove it or choose another folder"
        )
    missing = [path for path in (destination, *destination.parents) if not path.exists()]
    partial = destination / PARTIAL_FOLDER
    try:
        destination.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except FileExistsError as error:
        if not destination.is_dir():
            raise DataError(f"{destination}: is not a folder; choose another") from error
        raise DataError(
            f"{partial}: another process is packing into this folder, or was killed while it did; "
            "if none is running, remove the folder and try again"
        ) from error
    except OSError as error:
        _remove_empty(missing)
        raise _cannot_write(destination, error) from error
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        _remove_empty(missing)
        raise
    partial.rmdir()


def _remove_empty(folders: list[Path]) -> None:
    """Remove these folders, innermost first, as long as they exist and are empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def _write_file(path: Path, content: bytes | memoryview) -> None:
    try:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # The message names the final path, which the user knows, not the temporary one.
        raise _cannot_write(path.parent.parent / path.name, error) from error


def _publish(partial: Path, destination: Path, files: list[str]) -> None:
    """Rename the files into the destination, in this order, and flush the folder to the disk."""
    moved: list[Path] = []
    try:
        for name in files:
            (partial / name).rename(destination / name)
            moved.append(destination / name)
        descriptor = os.open(destination, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
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
