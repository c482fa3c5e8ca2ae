"""Packing a user's images: folders, CSV files, arrays and the official CIFAR archives.

Files are decoded on several processes in the order of their list, and one process writes the
shards: the result is the same for any number of them, and a killed run resumes after its last
shard.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from hvdtrain.data import cifar
from hvdtrain.data.arrays import ArraySource, holds_arrays, read_arrays
from hvdtrain.data.images import check_size, shown
from hvdtrain.data.index import Encoding, Index, Resize
from hvdtrain.data.listing import (
    ALONE,
    Listing,
    list_csv,
    list_folder,
    parse_split,
    split_labels,
    split_listing,
)
from hvdtrain.data.walk import kind_of
from hvdtrain.data.workers import Files, PackOptions, Task, broken_file, read_image, worker_pool
from hvdtrain.data.writer import Layout, Progress, write_sources
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import output

DEFAULT_FILES_SIZE = 224  # the size that image files are decoded to without --size
_FILES_LOOKED_AT = 1000  # for the average size of a file
_MOST_WORKERS = 512


def pack(
    source: Path | str,
    destination: Path | str,
    shard_mb: int = 64,
    *,
    size: int | None = None,
    resize: Resize = "shorter",
    encoding: Encoding = "raw",
    split: str | None = None,
    seed: int = 0,
    skip_broken: bool = False,
    workers: int | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Index:
    """Pack images into HDF5 shards; return the index of the data set.

    A pack of files that was killed resumes if it is started again with the same options. Its
    result does not depend on `workers`.

    Args:
        source: a folder with a folder of images per class, inside `train` and `test` (or `val`)
            or alone; a CSV file of file and label, or a folder of `train.csv` and `test.csv`; an
            .npz file or a folder of .npy files; or an official CIFAR archive.
        destination: new folder for the shards.
        shard_mb: size of a shard in MiB.
        size: side in pixels that images are resized to; None if all have one size.
        resize: how, as in `hvdtrain.data.resize`.
        encoding: "raw" stores pixels; "jpeg" keeps the image files as they are, and they are
            decoded when they are read.
        split: the parts of train and test, such as "0.9,0.1", for a source without splits.
        seed: chooses the images of the test split.
        skip_broken: leave out image files that cannot be decoded, and count them in the notes of
            the index.
        workers: processes that decode; None for one per core.
        report: receives a line per file that was left out, and one with the counts of files that
            are no images by their suffix.

    Raises:
        UsageError: for options that are out of range or do not fit the source.
        DataError: naming the file, for a source that cannot be packed; then nothing is written.
    """
    source = Path(source)
    options = PackOptions(size, resize, encoding, split, seed, skip_broken)
    _check(options, workers)
    if not source.exists():
        raise DataError(
            f"{shown(source)}: no such file or folder; get CIFAR with `hvdtrain data fetch`, or "
            "give a folder with one folder of images per class"
        )
    if cifar.is_official(source):
        if options != PackOptions(seed=seed):
            raise UsageError("an official CIFAR archive takes no other option than --shard-mb")
        return cifar.pack(source, destination, shard_mb)
    if source.suffix.lower() in (".npz", ".npy") or (source.is_dir() and holds_arrays(source)):
        return _pack_arrays(source, Path(destination), options, shard_mb)
    if source.is_file() and source.suffix.lower() != ".csv":
        raise DataError(
            f"{shown(source)}: is {kind_of(source)}: give a folder of images, a .csv file of "
            "file,label, an .npz file of arrays or a .tar.gz of CIFAR, or use hvdtrain.data.write"
        )
    is_csv = source.is_file() or (source / "train.csv").is_file()
    listing = list_csv(source) if is_csv else list_folder(source)
    if _has_splits(source, listing.splits, options):
        listing = split_listing(listing, parse_split(cast(str, split)), seed)
    return _pack_files(listing, Path(destination), options, shard_mb, workers, report)


def _check(options: PackOptions, workers: int | None) -> None:
    if options.size is not None:
        check_size(options.size, options.resize)
    if options.encoding not in ("raw", "jpeg"):
        raise UsageError(f"--encoding {options.encoding}: choose raw or jpeg")
    if options.split is not None:
        parse_split(options.split)
    if workers is not None and not 1 <= workers <= _MOST_WORKERS:
        raise UsageError(f"--workers {workers}: choose from 1 to {_MOST_WORKERS}")


def _has_splits(source: Path, splits: dict[str, Any], options: PackOptions) -> bool:
    """Return whether the source has to be split, after a check of --split."""
    is_alone = ALONE in splits
    if is_alone and options.split is None:
        raise UsageError(
            f"{shown(source)} has no test split: give --split 0.9,0.1, or put the images into "
            "train/ and test/ (or train.csv and test.csv)"
        )
    if not is_alone and options.split is not None:
        raise UsageError(f"{shown(source)} has a test split already: leave --split out")
    return is_alone


def _pack_arrays(source: Path, destination: Path, options: PackOptions, shard_mb: int) -> Index:
    if options.encoding == "jpeg" or options.skip_broken:
        raise UsageError(
            f"{shown(source)} holds pixels: --encoding jpeg and --skip-broken are for image files"
        )
    arrays, class_names = read_arrays(source)
    if _has_splits(source, arrays, options):
        ((array, labels),) = arrays.values()
        parts = parse_split(cast(str, options.split))
        test, train = split_labels(labels, parts, options.seed, class_names)
        rows = {"train": train, "test": test}
        arrays = dict.fromkeys(rows, (array, labels))
    else:
        rows = {name: np.arange(len(labels)) for name, (_, labels) in arrays.items()}
    sides = {array.shape()[1:3] for array, _ in arrays.values()}
    if options.size is None and len(sides) > 1:
        raise DataError(f"{shown(source)}: its splits have images of two sizes: give --size N")
    height, width = (options.size, options.size) if options.size else sides.pop()
    _check_square(height, width, str(shown(source)))
    sources = {
        name: ArraySource(array, labels, rows[name], options.size, options.resize)
        for name, (array, labels) in arrays.items()
    }
    with progress_bar("packing", sum(map(len, rows.values()))) as progress:
        layout = Layout((height, width, 3), shard_mb=shard_mb)
        return write_sources(destination, sources, layout, class_names, progress=progress)


def _check_square(height: int, width: int, place: str) -> None:
    if height != width:
        raise DataError(
            f"{place}: image of {width}x{height} pixels: models need squares of one size: "
            "give --size N"
        )


def _pack_files(
    listing: Listing,
    destination: Path,
    options: PackOptions,
    shard_mb: int,
    workers: int | None,
    report: Callable[[str], None],
) -> Index:
    splits = listing.splits
    size, file_bytes, how = options.size, 0, None
    if options.encoding == "jpeg":
        size = size or DEFAULT_FILES_SIZE
        file_bytes = _average_bytes(listing)
        how = options.resize
    if size is None:
        size = _common_size(listing, options.skip_broken)
    layout = Layout((size, size, 3), how, file_bytes, shard_mb)
    may_resize = options.size is not None or how is not None
    task = Task(str(listing.folder), size, may_resize, options)
    files = sum(len(images.paths) for images in splits.values())
    with worker_pool(min(workers or _cores(), files)) as pool:
        needed = {"train": listing.class_names}
        sources = {
            name: Files(images, task, pool, layout, needed.get(name, ()))
            for name, images in splits.items()
        }
        with progress_bar("packing", files) as progress:
            index = write_sources(
                destination,
                sources,
                layout,
                listing.class_names,
                listing.notes,
                key=pack_key(listing, options, shard_mb),
                progress=progress,
            )
    for source in sources.values():
        for _, fault in source.broken:
            report(fault)
    if listing.left_out:
        report(f"by their suffix no images: {listing.left_out}")
    return index


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def pack_key(listing: Listing, options: PackOptions, shard_mb: int) -> str:
    """Return what identifies a pack: options, files and labels, and when the files changed."""
    digest = hashlib.sha256(repr((asdict(options), shard_mb, listing.class_names)).encode())
    for name, images in listing.splits.items():
        digest.update(f"{name} {len(images.paths)} ".encode())
        digest.update(images.labels.tobytes())
        for path in images.paths:
            status = _status(listing.folder, path)
            text = f"{status.st_size} {status.st_mtime_ns}" if status else "missing"
            digest.update(os.fsencode(path) + f"\0{text}\0".encode())
    return digest.hexdigest()


def _average_bytes(listing: Listing) -> int:
    """Return the average size of a file, from files spread over the train split."""
    paths = listing.splits["train"].paths
    chosen = paths[:: max(1, len(paths) // _FILES_LOOKED_AT)]
    sizes = [status.st_size for path in chosen if (status := _status(listing.folder, path))]
    return sum(sizes) // max(1, len(sizes))


def _status(folder: Path, path: str) -> os.stat_result | None:
    """Return the status of a file; None for one that is refused or left out later."""
    try:  # a Path per file takes longer than its status
        return os.stat(os.path.join(folder, path))  # noqa: PTH116, PTH118
    except (OSError, ValueError):  # ValueError: a null byte in the name
        return None


def _common_size(listing: Listing, skip_broken: bool) -> int:
    """Return the side of the first image; raise DataError unless it is square."""
    for path in (path for images in listing.splits.values() for path in images.paths):
        try:
            image = read_image(listing.folder / path)
        except DataError as error:
            if skip_broken:
                continue
            raise broken_file(error) from None
        height, width = image.shape[:2]
        _check_square(height, width, shown(listing.folder / path))
        return len(image)
    raise DataError(f"{shown(listing.folder)}: not one of its images can be read")


@contextmanager
def progress_bar(name: str, total: int) -> Iterator[Progress]:
    """Yield a function that shows how many of `total` images are done, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=output.console(stderr=True)) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.update(task, completed=done)
