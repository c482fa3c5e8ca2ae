"""Packing a user's images: folders, CSV files, arrays and the official CIFAR archives.

Files are decoded on several processes in the order of their list, and one process writes the
shards: the result is the same for any number of them, and a killed run resumes after its last
shard.
"""

import errno
import hashlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import sources
from hvdtrain.data.arrays import Array, chosen_rows, read_arrays
from hvdtrain.data.images import check_size, decode, open_image, resized, shown
from hvdtrain.data.index import Encoding, Index, Reference, Resize
from hvdtrain.data.listing import (
    ALONE,
    Images,
    Listing,
    kind_of,
    list_csv,
    list_folder,
    parse_split,
    some,
    split_labels,
)
from hvdtrain.data.writer import (
    Block,
    Fault,
    Layout,
    Progress,
    Resumable,
    Source,
    counted,
    in_order,
    write_sources,
)
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import output
from hvdtrain.host.process import end_with_parent, usable_cores
from hvdtrain.host.records import opened

DEFAULT_FILES_SIZE = 224  # the size that image files are decoded to without --size
_FILES_LOOKED_AT = 1000  # for the average size of a file
_MOST_WORKERS = 512
_BLOCK_BYTES = 2**22  # of images that a process decodes at a time
_BLOCK_FILES = 64
_AHEAD = 3  # blocks per process that are ready or being made
_HDF5 = re.compile(r"(?P<file>.+\.(h5|hdf5)):(?P<names>[^:]+)", re.IGNORECASE)
_HDF5_SUFFIXES = (".h5", ".hdf5")
# Errors of a file that is itself broken; after others the file may be good.
_FILE_ERRORS = (errno.ENOENT, errno.EACCES, errno.ELOOP, errno.EISDIR)

Result = tuple[Block, list[Fault]]  # good files; the others


@dataclass(frozen=True)
class PackOptions:
    """Options of `pack`."""

    size: int | None = None
    resize: Resize = "shorter"
    encoding: Encoding = "raw"
    split: str | None = None
    seed: int = 0
    skip_broken: bool = False
    reference: bool = False


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
    reference: bool = False,
    workers: int | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Index:
    """Pack images into HDF5 shards; return the index of the data set.

    A pack of files that was killed resumes if it is started again with the same options. Its
    result does not depend on `workers`.

    Args:
        source: a folder with a folder of images per class, inside `train` and `test` (or `val`)
            or alone; a CSV file of file and label, or a folder of `train.csv` and `test.csv`; an
            .npz file or a folder of .npy files, of images or of other inputs; data sets of an HDF5
            file, as FILE.h5:/inputs,/targets; or an official CIFAR archive.
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
        reference: of data sets of an HDF5 file, store targets and hashes of the inputs alone, and
            read the inputs from that file.
        workers: processes that decode; None for one per core.
        report: receives a line per file that was left out, and one with the counts of files that
            are no images by their suffix.

    Raises:
        UsageError: for options that are out of range or do not fit the source.
        DataError: naming the file, for a source that cannot be packed; then nothing is written.
    """
    in_hdf5 = _HDF5.fullmatch(str(source))
    source = Path(in_hdf5["file"] if in_hdf5 else source)
    options = PackOptions(size, resize, encoding, split, seed, skip_broken, reference)
    if reference and (not in_hdf5 or size is not None):
        raise UsageError(
            "--reference reads data sets of an HDF5 file as they are: FILE.h5:/inputs,/targets, "
            "without --size"
        )
    if size is not None:
        check_size(size, resize)
    if encoding not in ("raw", "jpeg"):
        raise UsageError(f"--encoding {encoding}: choose raw or jpeg")
    if split is not None:
        parse_split(split)
    if workers is not None and not 1 <= workers <= _MOST_WORKERS:
        raise UsageError(f"--workers {workers}: choose from 1 to {_MOST_WORKERS}")
    if not source.exists():
        raise DataError(
            f"{shown(source)}: no such file or folder; get CIFAR with `hvdtrain data fetch`, or "
            "give a folder with one folder of images per class"
        )
    if in_hdf5:
        names = in_hdf5["names"].split(",")
        return _pack_arrays(source, Path(destination), options, shard_mb, names)
    if source.suffix.lower() in _HDF5_SUFFIXES:
        raise DataError(f"{shown(source)}: name its data sets, as {source}:/inputs,/targets")
    if sources.is_official(source):
        if options != PackOptions(seed=seed):
            raise UsageError("an official CIFAR archive takes no other option than --shard-mb")
        return sources.pack(source, destination, shard_mb)
    if source.suffix.lower() in (".npz", ".npy") or any(source.glob("*.npy")):
        return _pack_arrays(source, Path(destination), options, shard_mb)
    if source.is_file() and source.suffix.lower() != ".csv":
        raise DataError(
            f"{shown(source)}: is {kind_of(source)}: give a folder of images, a .csv file of "
            "file,label, an .npz file of arrays or a .tar.gz of CIFAR, or use hvdtrain.data.write"
        )
    is_csv = source.is_file() or (source / "train.csv").is_file()
    listing = list_csv(source) if is_csv else list_folder(source)
    if _has_splits(source, listing.splits, options):
        images = listing.splits[ALONE]
        test, train = split_labels(images.labels, cast(str, split), seed, listing.class_names)
        splits = {"train": images.take(train), "test": images.take(test)}
        listing = replace(listing, splits=splits)
    return _pack_files(listing, Path(destination), options, shard_mb, workers, report)


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


def _pack_arrays(
    source: Path,
    destination: Path,
    options: PackOptions,
    shard_mb: int,
    names_in_hdf5: Sequence[str] | None = None,
) -> Index:
    if options.encoding == "jpeg" or options.skip_broken:
        raise UsageError(
            f"{shown(source)} holds pixels: --encoding jpeg and --skip-broken are for image files"
        )
    arrays, class_names, targets = read_arrays(source, names_in_hdf5)
    if _has_splits(source, arrays, options):
        ((array, labels),) = arrays.values()
        numbers, names = (
            (labels, class_names) if targets is None else (np.zeros(len(labels), np.int32), ("",))
        )
        test, train = split_labels(numbers, cast(str, options.split), options.seed, names)
        rows = {"train": train, "test": test}
        arrays = dict.fromkeys(rows, (array, labels))
    else:
        rows = {name: np.arange(len(labels)) for name, (_, labels) in arrays.items()}
    forms = {(one.stored_shape, one.dtype.name, one.is_input) for one, _ in arrays.values()}
    if len(forms) > 1 and any(is_input for *_, is_input in forms):
        named = " and ".join(sorted(f"{dtype} {list(shape)}" for shape, dtype, _ in forms))
        raise DataError(f"{shown(source)}: its splits differ, {named}: give all the same form")
    if len(forms) > 1 and options.size is None:
        raise DataError(f"{shown(source)}: its splits have images of two sizes: give --size N")
    (height, width, channels), dtype, is_input = forms.pop()
    if is_input and options.size:
        raise UsageError(f"{shown(source)} holds no images: leave --size out")
    if not is_input:
        height, width = (options.size, options.size) if options.size else (height, width)
        _check_square(height, width, str(shown(source)))
    shape, reference = (height, width, channels), None
    if options.reference:
        reference = _reference(source, {name: array for name, (array, _) in arrays.items()})
    sources = {
        name: in_order(chosen_rows(array, labels, rows[name], options.size, options.resize))
        for name, (array, labels) in arrays.items()
    }
    with progress_bar("packing", sum(map(len, rows.values()))) as progress:
        layout = Layout(
            shape,
            shard_mb=shard_mb,
            targets=targets,
            image_dtype=dtype,
            reference=reference,
            rows=rows,
        )
        return write_sources(destination, sources, layout, class_names, progress=progress)


def _reference(source: Path, arrays: Mapping[str, Array]) -> Reference:
    """Return the reference to arrays of an HDF5 file by split.

    Raises:
        UsageError: if they cannot be read as they are.
    """
    for array in arrays.values():
        if not array.is_input and array.shape[3:] != (3,):
            raise UsageError(f"{array.place}: --reference reads images as RGB alone: leave it out")
    names = {name: str(array.member) for name, array in arrays.items()}
    return Reference(str(source.resolve()), names)


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
    size, file_bytes, how = options.size, 0, None
    if options.encoding == "jpeg":
        size, how = size or DEFAULT_FILES_SIZE, options.resize
        paths = listing.splits["train"].paths
        chosen = paths[:: max(1, len(paths) // _FILES_LOOKED_AT)]
        sizes = [status.st_size for path in chosen if (status := _status(listing.folder, path))]
        file_bytes = sum(sizes) // max(1, len(sizes))
    if size is None:
        size = _common_size(listing, options.skip_broken)
    layout = Layout((size, size, 3), how, file_bytes, shard_mb)
    rows = max(1, min(_BLOCK_FILES, _BLOCK_BYTES // layout.image_bytes))
    may_resize = options.size is not None or how is not None
    task = Task(str(listing.folder), size, may_resize, options)
    files = sum(len(images.paths) for images in listing.splits.values())
    workers = min(workers or len(usable_cores()), files)
    with _worker_pool(workers) as pool, progress_bar("packing", files) as progress:

        def file_source(name: str) -> Source:
            broken: list[Fault] = []
            needed = listing.class_names if name == "train" else ()
            made = partial(_blocks, listing.splits[name], task, pool, _AHEAD * workers, rows)
            return Source(partial(made, needed, broken), broken)

        sources = {name: file_source(name) for name in listing.splits}
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


def _status(folder: Path, path: str) -> os.stat_result | None:
    """Return the status of a file; None for one that is refused or left out later."""
    try:  # a Path per file takes longer than its status
        return os.stat(os.path.join(folder, path))  # noqa: PTH116, PTH118
    except (OSError, ValueError):  # ValueError: a null byte in the name
        return None


def _common_size(listing: Listing, skip_broken: bool) -> int:
    """Return the side of the first image; raise DataError unless it is square."""
    for path in (path for images in listing.splits.values() for path in images.paths):
        file = str(listing.folder / path)
        try:
            image = decode(_content(file), file)
        except DataError as error:
            if skip_broken:
                continue
            raise _broken_file(error) from None
        _check_square(image.shape[0], image.shape[1], shown(file))
        return len(image)
    raise DataError(f"{shown(listing.folder)}: not one of its images can be read")


def _broken_file(error: DataError) -> DataError:
    """Return an error of one file with what may be done about it."""
    return DataError(f"{error}: restore it, or leave broken files out with --skip-broken")


class _NeverLeftOut(DataError):
    """A fault that --skip-broken does not cover, because the file is good."""


def _content(path: str) -> bytes:
    try:
        with opened(Path(path)) as file:  # a FIFO would wait
            return file.read()
    except ValueError as error:  # a null byte in the name
        raise DataError(f"{shown(path)}: cannot be read ({error})") from None
    except OSError as error:
        kind = DataError if error.errno in _FILE_ERRORS else _NeverLeftOut
        raise kind(f"{shown(path)}: cannot be read ({error.strerror})") from None


@dataclass(frozen=True)
class Task:
    """The work of a process: to read, decode and resize files.

    Attributes:
        size: side of the images in pixels.
        may_resize: whether images of other sizes are resized, and not refused.
    """

    folder: str
    size: int
    may_resize: bool
    options: PackOptions

    def run(self, paths: Sequence[str], labels: NDArray[np.int32], start: int) -> Result:
        """Return a block of the files; `start` is the place of the first one.

        Raises:
            DataError: naming the first broken file, unless it may be left out.
        """
        good: list[int] = []
        images: list[Any] = []
        counts = np.zeros((len(paths), 3, 256), np.int64)
        broken: list[Fault] = []
        for row, path in enumerate(paths):
            try:
                content, image = self._read(str(Path(self.folder, path)))
            except _NeverLeftOut:
                raise
            except DataError as error:
                if not self.options.skip_broken:
                    raise _broken_file(error) from None
                broken.append((start + row, str(error)))
                continue
            good.append(row)
            images.append(content if self.options.encoding == "jpeg" else image)
            counts[row] = counted(image[None])
        if images and self.options.encoding == "raw":
            array = np.stack(images)
        else:
            array = np.empty(len(images), object)
            array[:] = images
        places = start + np.array(good, np.int64)
        return Block(array, labels[good], places, counts[good].astype(np.uint32)), broken

    def _read(self, path: str) -> tuple[bytes, NDArray[np.uint8]]:
        content = _content(path)
        image = open_image(content, path)
        width, height = image.size
        if not self.may_resize and (height, width) != (self.size, self.size):
            raise _NeverLeftOut(
                f"{shown(path)}: image of {width}x{height} pixels, others have "
                f"{self.size}x{self.size}: give --size N to resize all"
            )
        return content, resized(image, self.size, self.options.resize, path)


def _blocks(
    images: Images,
    task: Task,
    pool: ProcessPoolExecutor,
    ahead: int,
    rows: int,
    needed: Sequence[str],
    broken: list[Fault],
    start: int,
) -> Iterator[Block]:
    """Yield the good files of a split from place `start` on, in order, in blocks of up to `rows`.

    Args:
        ahead: the most blocks that are ready or being made.
        needed: names of the classes, if each needs a good file.
        broken: receives the files that were left out.

    Raises:
        DataError: for a broken file that is not left out; after the last block, for a class
            whose files were all left out.
    """
    paths, labels = images.paths, images.labels
    places = iter(range(start, len(paths), rows))
    waiting: deque[Future[Result]] = deque()
    try:
        while True:
            for low in islice(places, ahead - len(waiting)):
                part = slice(low, low + rows)
                waiting.append(pool.submit(task.run, paths[part], labels[part], low))
            if not waiting:
                break
            block, faults = waiting.popleft().result()
            broken += faults
            if len(block):
                yield block
    except BrokenProcessPool:
        raise Resumable(
            "a packing process was killed, perhaps for its memory: run the command again with "
            "fewer --workers to resume"
        ) from None
    good = np.delete(labels, [place for place, _ in broken])
    if lacking := sorted(set(range(len(needed))) - set(good.tolist())):
        path = Path(task.folder, paths[labels.tolist().index(lacking[0])])
        raise DataError(
            f"every training image of {some(needed[number] for number in lacking)} is "
            f"broken, such as {shown(path)}: restore the images, or remove the class"
        )


@contextmanager
def _worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield processes that end with this one."""
    executor = ProcessPoolExecutor(workers, get_context("fork"), _start)
    try:
        executor.submit(os.getpid).result()  # all are forked now, before there are more threads
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def _start() -> None:
    """Set up a worker: the parent alone handles Ctrl-C, and its end is that of the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)


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
