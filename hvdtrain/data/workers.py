"""Decoding image files on several processes, in the order of their list and in bounded memory."""

import errno
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.images import decode, open_image, resized, shown
from hvdtrain.data.index import Encoding, Resize
from hvdtrain.data.listing import Images, some
from hvdtrain.data.writer import Block, Layout, Resumable, count_values
from hvdtrain.errors import DataError
from hvdtrain.host.records import opened
from hvdtrain.host.stop import end_with_parent

Result = tuple[Block, list[tuple[int, str]]]  # good files; place and fault of the others

_BLOCK_BYTES = 2**22  # of images that a process decodes at a time
_BLOCK_FILES = 64
_AHEAD = 3  # blocks per process that are ready or being made
# Errors of a file that is itself broken; after others the file may be good.
_FILE_ERRORS = (errno.ENOENT, errno.EACCES, errno.ELOOP, errno.EISDIR)


@dataclass(frozen=True)
class PackOptions:
    """Options of `hvdtrain.data.pack`."""

    size: int | None = None
    resize: Resize = "shorter"
    encoding: Encoding = "raw"
    split: str | None = None
    seed: int = 0
    skip_broken: bool = False


class _NeverLeftOut(DataError):
    """A fault that --skip-broken does not cover, because the file is good."""


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
        counts: list[NDArray[np.uint32]] = []
        broken: list[tuple[int, str]] = []
        for row, path in enumerate(paths):
            try:
                content, image = self._read(str(Path(self.folder, path)))
            except DataError as error:
                if isinstance(error, _NeverLeftOut):
                    raise
                if not self.options.skip_broken:
                    raise broken_file(error) from None
                broken.append((start + row, str(error)))
                continue
            good.append(row)
            images.append(content if self.options.encoding == "jpeg" else image)
            counts.append(_histogram(image))
        places = start + np.array(good, np.int64)
        return Block(_array(images), labels[good], places, _array(counts)), broken

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


def broken_file(error: DataError) -> DataError:
    """Return an error of one file with what may be done about it."""
    return DataError(f"{error}: restore it, or leave broken files out with --skip-broken")


def read_image(path: Path) -> NDArray[np.uint8]:
    """Return the pixels of an image file as `decode` does; raise DataError if it is broken."""
    return decode(_content(os.fspath(path)), os.fspath(path))


def _content(path: str) -> bytes:
    try:
        with opened(Path(path)) as file:  # a FIFO would wait
            return file.read()
    except ValueError as error:  # a null byte in the name
        raise DataError(f"{shown(path)}: cannot be read ({error})") from None
    except OSError as error:
        kind = DataError if error.errno in _FILE_ERRORS else _NeverLeftOut
        raise kind(f"{shown(path)}: cannot be read ({error.strerror})") from None


def _histogram(image: NDArray[np.uint8]) -> NDArray[np.uint32]:
    histogram = np.zeros((3, 256), np.int64)
    count_values(image[None], histogram)
    return histogram.astype(np.uint32)


def _array(items: list[Any]) -> NDArray[Any]:
    if items and not isinstance(items[0], bytes):
        return np.stack(items)
    array = np.empty(len(items), object)
    array[:] = items
    return array


@dataclass(frozen=True)
class Pool:
    """Processes that decode."""

    executor: ProcessPoolExecutor
    workers: int


@dataclass
class Files:
    """A split whose images are files.

    Attributes:
        needed: names of the classes, if each needs a good file.
    """

    images: Images
    task: Task
    pool: Pool | None
    layout: Layout
    needed: Sequence[str] = ()
    broken: list[tuple[int, str]] = field(default_factory=list)

    def blocks(self, start: int, rows: int) -> Iterator[Block]:
        """Yield the good files from place `start` on, in blocks of any size.

        Raises:
            DataError: for a broken file that is not left out; after the last block, for a class
                whose files were all left out.
        """
        step = max(1, min(_BLOCK_FILES, _BLOCK_BYTES // self.layout.image_bytes))
        paths, labels = self.images.paths, self.images.labels
        calls = (
            partial(self.task.run, paths[low : low + step], labels[low : low + step], low)
            for low in range(start, len(paths), step)
        )
        for block, broken in _in_order(self.pool, calls):
            self.broken += broken
            if len(block):
                yield block
        self._check_classes()

    def _check_classes(self) -> None:
        """Raise DataError for a class that needs a good file and has none."""
        good = np.delete(self.images.labels, [place for place, _ in self.broken])
        lacking = sorted(set(range(len(self.needed))) - set(np.unique(good).tolist()))
        if lacking:
            first = next(p for p, number in enumerate(self.images.labels) if number == lacking[0])
            path = str(Path(self.task.folder, self.images.paths[first]))
            raise DataError(
                f"every training image of {some(self.needed[number] for number in lacking)} is "
                f"broken, such as {shown(path)}: restore the images, or remove the class"
            )


def _in_order(pool: Pool | None, calls: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """Yield the results of the calls in order; few of them are made in advance."""
    if pool is None:
        for call in calls:
            yield call()
        return
    most = _AHEAD * pool.workers
    waiting: deque[Future[Result]] = deque()
    try:
        for call in calls:
            waiting.append(pool.executor.submit(call))
            if len(waiting) >= most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise Resumable(
            "a packing process was killed, perhaps for its memory: run the command again with "
            "fewer --workers to resume"
        ) from None
    finally:
        for future in waiting:
            future.cancel()


@contextmanager
def worker_pool(workers: int) -> Iterator[Pool | None]:
    """Yield processes that end with this one; None for a single one: this process itself."""
    if workers < 2:
        yield None
        return
    executor = ProcessPoolExecutor(workers, get_context("fork"), _start)
    try:
        executor.submit(os.getpid).result()  # all are forked now, before there are more threads
        yield Pool(executor, workers)
    finally:
        executor.shutdown(cancel_futures=True)


def _start() -> None:
    """Set up a worker: the parent alone handles Ctrl-C, and its end is that of the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
