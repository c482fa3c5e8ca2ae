"""Reading a packed data set by row number in bounded memory, checking, describing and copying it.

Example:
    index = read_index("data/cifar10")
    with open_split(index, "train") as samples:
        batch = samples.gather(rows)

A shard is an HDF5 file of `images` [n, height, width, channels], `labels` [n] and `ids` [n].
Labels are class numbers, or targets [n, ...] of another form. A shard of image files has `images`
[bytes], the files one after the other, and `ends` [n], where each of them ends. One that refers to
a user's HDF5 file has `rows` [n] of it, and `hashes` [n, HASH_BYTES] of what they hold.

Each data set of a shard is chunked with Fletcher-32, and the file format (HDF5 1.10 and later) has
checksums over everything else that is read, so that any flipped bit raises an error or has no
effect. Files are opened without locks, which some network file systems lack.
"""

import hashlib
import io
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Self

import h5py
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hvdtrain.data.images import centre, open_image, resized
from hvdtrain.data.index import (
    INDEX_FILE,
    RESTORE,
    Index,
    Shard,
    Split,
    parse_index,
    read_index,
    reference_fault,
    size_fault,
)
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host.files import PRIVATE, make_own_folder, write_whole
from hvdtrain.host.process import usable_cores

DATA_SETS = ("images", "labels", "ids")
REFERENCE_SETS = ("labels", "ids", "rows", "hashes")
HASH_BYTES = 16  # of a sample's BLAKE2b
CHUNK_BYTES = 2**20  # upper bound of a chunk of images, unless one image is larger
FILES_CHUNK_BYTES = 2**17  # of the bytes of image files, which no chunk of rows is aligned with

# Errors that h5py raises for a file that is damaged or has an unexpected layout.
_READ_ERRORS = (OSError, KeyError, RuntimeError, ValueError, TypeError, AttributeError)


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples: `images` uint8 [n, height, width, channels], `labels` and `ids` int64 [n].

    Inputs that are no images have the numbers of `Index.image_dtype`. Labels that are not class
    numbers have the form of `Index.targets`, [n, ...].
    Of image files that are not decoded yet, `images` are `bytes` objects [n].
    """

    images: NDArray[Any]
    labels: NDArray[Any]
    ids: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)


def empty_batch(index: Index, rows: int) -> Batch:
    """Return memory for `rows` stored samples of a data set."""
    if index.resize is None:
        images: NDArray[Any] = np.empty((rows, *index.stored_shape), index.image_dtype)
    else:
        images = np.empty(rows, object)
    return Batch(
        images=images,
        labels=np.empty((rows, *index.target_form.shape), index.target_form.dtype),
        ids=np.empty(rows, np.int64),
    )


def chunk_rows(image_bytes: int) -> int:
    """Return the images per chunk: the power of two for 0.5 to 1 MiB, at least one image."""
    fit = max(1, CHUNK_BYTES // image_bytes)
    return int(2 ** (fit.bit_length() - 1))


def encode_shard(
    samples: Batch, rows: int, source_rows: NDArray[np.int64] | None = None
) -> memoryview:
    """Return the content of the shard file with `samples` in chunks of `rows`, reproducibly.

    The file is made in memory, because HDF5 cannot be closed cleanly on a full disk.

    Args:
        source_rows: of a user's file that holds the images; None to store the images.
    """
    content = io.BytesIO()
    rows = min(rows, len(samples))
    arrays = {name: getattr(samples, name) for name in DATA_SETS}
    if source_rows is not None:
        del arrays["images"]
        arrays |= {"rows": source_rows, "hashes": _hashes(samples.images)}
    chunks = {name: (rows, *array.shape[1:]) for name, array in arrays.items()}
    if samples.images.dtype == object:
        arrays["images"] = np.frombuffer(b"".join(samples.images), np.uint8)
        arrays["ends"] = np.cumsum([len(file) for file in samples.images], dtype=np.int64)
        chunks["images"] = (min(FILES_CHUNK_BYTES, len(arrays["images"])),)
        chunks["ends"] = (rows,)
    with _new_file(content) as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, chunks=chunks[name], fletcher32=True)
    return content.getbuffer()


def _new_file(content: io.BytesIO) -> h5py.File:
    """Return an empty HDF5 file in memory, in the format with checksums, without timestamps."""
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_obj_track_times(False)  # h5py.File would stamp the root group
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, content)
    return h5py.File(h5py.h5f.create(b"shard", h5py.h5f.ACC_TRUNC, creation, access))


def open_shard(index: Index, shard: Shard) -> h5py.File:
    """Open a shard's file for reading, and check the shapes and types of its data sets.

    Raises DataError for a file that is damaged or does not match the index.
    """
    path = index.folder / shard.file
    try:
        # Chunks are read whole and once: HDF5's own cache would only copy them once more.
        file = h5py.File(path, "r", locking=False, rdcc_nbytes=0)
    except _READ_ERRORS as error:
        raise DataError(f"{path}: shard cannot be opened ({_one_line(error)})") from error
    try:
        fault = _layout_fault(file, index, shard)
    except _READ_ERRORS as error:
        fault = f"is damaged outside its chunks ({_one_line(error)})"
    if fault:
        file.close()
        raise DataError(f"{path}: shard {fault}; {RESTORE}")
    return file


def _layout_fault(file: h5py.File, index: Index, shard: Shard) -> str | None:
    names = DATA_SETS if index.resize is None else (*DATA_SETS, "ends")
    for name in names if index.reference is None else REFERENCE_SETS:
        if fault := _storage_fault(file, name):
            return f"holds `{name}` {fault}"
        data_set = file[name]
        expected: tuple[int, ...] = (shard.count,)
        kind = "i"
        if name == "images":
            kind = np.dtype(index.image_dtype).kind
            is_files = index.resize is not None
            expected = file["images"].shape[:1] if is_files else (shard.count, *index.stored_shape)
        elif name == "labels":
            expected = (shard.count, *index.target_form.shape)
            kind = np.dtype(index.target_form.dtype).kind
        elif name == "hashes":
            expected, kind = (shard.count, HASH_BYTES), "u"
        if data_set.shape != expected or data_set.dtype.kind != kind:
            return f"holds `{name}` {data_set.shape} {data_set.dtype}, the index says {expected}"
    return None


def _storage_fault(file: h5py.File, name: str) -> str | None:
    """Return how a data set's storage differs from the one that hvdtrain writes; None if not.

    HDF5 follows links to other files and raw storage in them, which the SHA-256 of the shard does
    not cover, and it loads the code of a filter that it does not know.
    """
    # The link is checked before it is followed.
    if isinstance(file.get(name, getlink=True), h5py.SoftLink | h5py.ExternalLink):
        return "through a link"
    creation = file[name].id.get_create_plist()
    if creation.get_layout() == h5py.h5d.VIRTUAL or creation.get_external_count():
        return "in another file"
    filters = [creation.get_filter(place)[0] for place in range(creation.get_nfilters())]
    if h5py.h5z.FILTER_FLETCHER32 not in filters:
        return "without checksums"
    return "with filters besides checksums" if len(filters) > 1 else None


def read_rows(file: h5py.File, index: Index, shard: Shard, start: int, stop: int) -> Batch:
    """Return rows [start, stop) of an open shard; raise DataError for a label without a class.

    Errors of h5py propagate: read_chunk and read_shard add the place.
    """
    batch = empty_batch(index, stop - start)
    holds_images = index.resize is None and index.reference is None
    for name in DATA_SETS if holds_images else DATA_SETS[1:]:
        file[name].read_direct(getattr(batch, name), np.s_[start:stop])
    if index.resize is not None:
        batch.images[:] = _read_files(file, start, stop)
    if index.reference is not None:
        split = next(name for name, one in index.splits.items() if shard in one.shards)
        place = index.reference.file, index.reference.data_sets[split]
        rows, hashes = file["rows"][start:stop], file["hashes"][start:stop]
        _read_referenced(*place, rows, hashes, batch.images)
    is_class = index.targets is None
    if is_class and (batch.labels.min() < 0 or batch.labels.max() >= index.classes):
        path = index.folder / shard.file
        raise DataError(f"{path}: holds a label outside 0..{index.classes - 1}; pack it again")
    return batch


def _read_files(file: h5py.File, start: int, stop: int) -> NDArray[Any]:
    """Return the bytes of the image files in rows [start, stop): `bytes` objects [n]."""
    before = start - 1 if start else 0
    ends = file["ends"][before:stop].astype(np.int64)
    if not start:
        ends = np.concatenate([np.zeros(1, np.int64), ends])
    if (np.diff(ends) <= 0).any() or ends[0] < 0 or ends[-1] > len(file["images"]):
        raise ValueError("the ends of the image files are not in order")
    content = file["images"][ends[0] : ends[-1]].tobytes()
    files = np.empty(stop - start, object)
    for row, (first, last) in enumerate(pairwise((ends - ends[0]).tolist())):
        files[row] = content[first:last]
    return files


def _read_referenced(
    path: str, name: str, rows: NDArray[np.int64], hashes: NDArray[np.uint8], to: NDArray[Any]
) -> None:
    """Read rows, which ascend, of a user's data set, and compare them with their hashes.

    Raises:
        DataError: if they cannot be read, or naming the first row that differs.
    """
    changed: list[int] = []
    # HDF5 is slow for single rows: those within one CHUNK_BYTES are read with the ones between.
    starts = np.flatnonzero(np.diff(rows // chunk_rows(max(1, to[:1].nbytes)))) + 1
    try:
        with h5py.File(path, "r", locking=False) as file:
            if len(file[name]) <= rows[-1]:
                raise ValueError(f"it has {len(file[name]):,} rows, and row {rows[-1]} is needed")
            for start, stop in pairwise([0, *starts.tolist(), len(rows)]):
                wanted = rows[start:stop]
                chosen = file[name][wanted[0] : wanted[-1] + 1][wanted - wanted[0]]
                is_rgb = chosen.dtype == np.uint8 and chosen.shape[-1] == 3
                part = to[start:stop]
                part[:] = chosen if is_rgb else channels_last(chosen)
                differs = (_hashes(part) != hashes[start:stop]).any(axis=1)
                changed += wanted[differs].tolist()
    except _READ_ERRORS as error:
        reason = _one_line(error)
        raise DataError(f"{path}: {name} cannot be read ({reason}); {RESTORE}") from error
    if changed:
        more = f" and {len(changed) - 1:,} more" if len(changed) > 1 else ""
        raise DataError(
            f"{path}: row {changed[0]} of {name}{more} changed after the data set was packed; "
            f"{RESTORE}"
        )


def channels_last(inputs: NDArray[Any]) -> NDArray[Any]:
    """Return inputs [n, height, width] or [n, channels, height, width] as they are stored."""
    whole = inputs[:, None] if inputs.ndim == 3 else inputs
    return np.ascontiguousarray(whole.transpose(0, 2, 3, 1))


def _hashes(images: NDArray[Any]) -> NDArray[np.uint8]:
    """Return a BLAKE2b of each image: uint8 [n, HASH_BYTES]."""
    digests = (
        hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=HASH_BYTES).digest()
        for image in images.astype(images.dtype.newbyteorder("="), copy=False)
    )
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, HASH_BYTES)


def read_chunk(file: h5py.File, index: Index, shard: Shard, rows: int, chunk: int) -> Batch:
    """Return chunk number `chunk` of a shard with `rows` rows per chunk.

    Raises DataError, naming the chunk, if it is damaged.
    """
    start, stop = chunk * rows, min((chunk + 1) * rows, shard.count)
    try:
        return read_rows(file, index, shard, start, stop)
    except _READ_ERRORS as error:
        path = index.folder / shard.file
        where = f"chunk {chunk} (rows {start}..{stop - 1})"
        raise DataError(
            f"{path}: {where} fails its checksum ({_one_line(error)}); {RESTORE}"
        ) from error


def read_shard(index: Index, shard: Shard) -> Batch:
    """Return all samples of a shard; raise DataError if it cannot be read."""
    with open_shard(index, shard) as file:
        return read_chunk(file, index, shard, shard.count, 0)


def chunk_faults(index: Index, split: Split, shard: Shard) -> list[str]:
    """Return one line per unreadable chunk of a shard, or one line for an unreadable shard.

    Each line starts with the path of the shard.
    """
    faults = []
    try:
        with open_shard(index, shard) as file:
            for chunk in range(-(-shard.count // split.chunk_rows)):
                try:
                    read_chunk(file, index, shard, split.chunk_rows, chunk)
                except DataError as error:
                    faults.append(str(error))
    except DataError as error:
        faults.append(str(error))
    return faults


def shard_sha256(index: Index, shard: Shard) -> str:
    """Return the SHA-256 (hex) of a shard's file; raise DataError if it cannot be read."""
    path = index.folder / shard.file
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: shard cannot be read ({error.strerror})") from error


def _one_line(error: BaseException) -> str:
    """Return the text of an h5py error without line breaks and enclosing quotation marks."""
    return " ".join(str(error).split()).strip("'\"")


# From a stored RGB image (an image file in its full size), its sample id and the size of the index
# to what is read: uint8 [size, size, 3].
Picture = Callable[[Image.Image, int, int], NDArray[np.uint8]]
Verifier = tuple[int, int]  # number of a reader, and how many there are

_DIFFERS = "shard differs from the index (another SHA-256)"
_DEFAULT_MEMORY = 2**30
_OPEN_FILES = 64
_MOST_THREADS = 16
_THREAD_ROWS = 4  # images that a thread decodes at a time
_COPY_BYTES = 4 * 2**20  # copied at a time
_ABANDONED_SECONDS = 3600.0
_FILE_OVERHEAD = 128  # bytes of an image file in memory besides its content, at most


def open_split(
    index: Index, split: str, memory_bytes: int = _DEFAULT_MEMORY, verifier: Verifier = (0, 1)
) -> "Samples":
    """Open the samples of a split, using at most `memory_bytes` of memory.

    A split that fits is read once and kept decoded; each shard is checked against its SHA-256.
    Of a larger split, whole chunks are read when they are needed, and the most recently used are
    kept. Each chunk is checked by its Fletcher-32, and each shard against its SHA-256 when it is
    opened for the first time. Raises UsageError for a split that does not exist.

    Args:
        verifier: number of this reader and how many there are, if several share the check of a
            large split's shards against their SHA-256: of N readers, each one checks every N-th.
    """
    if split not in index.splits:
        names = " and ".join(f"`{name}`" for name in index.splits)
        raise UsageError(f"no split {split!r}: the data set has {names}")
    return Samples(index, index.splits[split], memory_bytes, verifier)


class Samples:
    """The samples of one split, created by open_split; a context manager.

    Several threads may call it; calls are served one at a time. Files are opened at the first read
    by the process that reads: a forked process opens them again.
    """

    def __init__(
        self, index: Index, split: Split, memory_bytes: int, verifier: Verifier = (0, 1)
    ) -> None:
        # Of one stored sample, with a label and an id; of image files the average.
        sample_bytes = index.image_bytes + index.target_form.bytes + 8
        if index.resize is not None:
            stored = sum(shard.bytes for shard in split.shards)
            sample_bytes = stored // split.count + _FILE_OVERHEAD
        self.index = index
        self.split = split
        self.in_memory = split.count * sample_bytes <= memory_bytes
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._whole: Batch | None = None
        self._chunks: OrderedDict[int, Batch] = OrderedDict()
        self._chunk_bytes = split.chunk_rows * sample_bytes
        # An open file belongs to one process: HDF5 does not survive a fork.
        self._files: OrderedDict[tuple[int, int], h5py.File] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None
        self._threads_of = 0  # the process that started them
        self._verifier = verifier
        self._verified: set[int] = set()  # shards whose SHA-256 has been checked
        counts = np.array([shard.count for shard in split.shards], np.int64)
        self._first_rows = np.cumsum(counts) - counts  # first row of each shard

    def __len__(self) -> int:
        return self.split.count

    def __enter__(self) -> Self:
        self.load()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def load(self) -> None:
        """Read the split into memory now, if it fits; otherwise the first gather reads it."""
        with self._lock:
            if self.in_memory and self._whole is None:
                whole, start = empty_batch(self.index, self.split.count), 0
                for shard in self.split.shards:
                    _check_hash(self.index, self.split, shard)
                    samples = read_shard(self.index, shard)
                    _put(whole, slice(start, start + shard.count), samples)
                    start += shard.count
                self._whole = whole

    def gather(self, rows: NDArray[np.int64], picture: Picture | None = None) -> Batch:
        """Return the samples at these rows of the split, in this order, as new arrays.

        Image files are decoded on several threads.

        Args:
            picture: makes the image of a sample; without one it is resized as the index says, and
                its centre is returned.

        Raises:
            IndexError: for a row outside the split.
            DataError: for a damaged shard.
        """
        batch, index = self._stored(rows), self.index
        if index.resize is None and picture is None:
            if index.packed_shape is None:
                return batch
            images = np.ascontiguousarray(centre(batch.images, index.image_shape[0]))
            return Batch(images, batch.labels, batch.ids)
        images = np.empty((len(batch), *index.image_shape), np.uint8)

        def put(start: int) -> None:
            for row in range(start, min(start + _THREAD_ROWS, len(batch))):
                stored, sample = batch.images[row], int(batch.ids[row])
                name, size = f"{index.folder}: sample {sample}", index.image_shape[0]
                if index.resize is None:
                    image = Image.fromarray(stored)
                else:
                    image = open_image(stored, name)
                images[row] = picture(image, sample, size) if picture else view(index, image, name)

        for _ in self._started_threads().map(put, range(0, len(batch), _THREAD_ROWS)):
            pass
        return Batch(images, batch.labels, batch.ids)

    def labels(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return the labels at these rows, as `gather` does but without copying the images."""
        self._check(rows)
        if not len(rows):
            return empty_batch(self.index, 0).labels
        self.load()
        if self._whole is not None:
            return self._whole.labels[rows]
        return self._stored(rows).labels

    def ids(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample ids at these rows, as `labels` does."""
        whole = self.whole()
        return self._stored(rows).ids if whole is None else whole.ids[rows]

    def whole(self) -> Batch | None:
        """Return the whole split as it is stored, if it is in memory; not a copy."""
        self.load()
        return self._whole

    def _stored(self, rows: NDArray[np.int64]) -> Batch:
        """Return the samples as they are stored."""
        self._check(rows)
        self.load()
        if self._whole is not None:
            return _take(self._whole, rows)
        batch, chunks = empty_batch(self.index, len(rows)), rows // self.split.chunk_rows
        with self._lock:
            for chunk in np.unique(chunks):
                places = np.flatnonzero(chunks == chunk)
                inside = rows[places] - chunk * self.split.chunk_rows
                _put(batch, places, _take(self._chunk(int(chunk)), inside))
        return batch

    def _started_threads(self) -> ThreadPoolExecutor:
        """Return the threads that decode; those of another process do not survive a fork."""
        if self._threads is None or self._threads_of != os.getpid():
            number = min(len(usable_cores()), _MOST_THREADS)
            self._threads = ThreadPoolExecutor(number, thread_name_prefix="hvdtrain-decode")
            self._threads_of = os.getpid()
        return self._threads

    def close(self) -> None:
        """Close the files and free the memory; a later gather reads the split again."""
        with self._lock:
            for (process, _), file in self._files.items():
                if process == os.getpid():
                    file.close()
            self._files.clear()
            self._chunks.clear()
            self._verified.clear()
            self._whole = None
            if self._threads is not None and self._threads_of == os.getpid():
                self._threads.shutdown(wait=False)
            self._threads = None

    def _check(self, rows: NDArray[np.int64]) -> None:
        if len(rows) and not (rows.min() >= 0 and rows.max() < self.split.count):
            raise IndexError(f"a row outside 0..{self.split.count - 1} of {self.split.name}")

    def _chunk(self, chunk: int) -> Batch:
        """Return a chunk of the split, from memory if it was used recently."""
        if chunk not in self._chunks:
            while (
                self._chunks and (len(self._chunks) + 1) * self._chunk_bytes > self._memory_bytes
            ):
                self._chunks.popitem(last=False)
            row = chunk * self.split.chunk_rows
            number = int(np.searchsorted(self._first_rows, row, side="right")) - 1
            inside = (row - int(self._first_rows[number])) // self.split.chunk_rows
            shard = self.split.shards[number]
            file = self._file(number)
            self._chunks[chunk] = read_chunk(
                file, self.index, shard, self.split.chunk_rows, inside
            )
        self._chunks.move_to_end(chunk)
        return self._chunks[chunk]

    def _file(self, number: int) -> h5py.File:
        """Return the open file of shard number `number` for this process."""
        key = (os.getpid(), number)
        if key not in self._files:
            if len(self._files) >= _OPEN_FILES:
                (process, _), file = self._files.popitem(last=False)
                if process == os.getpid():
                    file.close()
            place, readers = self._verifier
            if number % readers == place and number not in self._verified:
                _check_hash(self.index, self.split, self.split.shards[number])
                self._verified.add(number)
            self._files[key] = open_shard(self.index, self.split.shards[number])
        self._files.move_to_end(key)
        return self._files[key]


def view(index: Index, image: Image.Image, name: str = "") -> NDArray[np.uint8]:
    """Return the pixels that a data set's reader sees of an RGB image: uint8 [size, size, 3].

    The image is resized to the stored size, or to that of the index if it is larger, and cut down
    to the centre. Evaluation and prediction see the same.
    """
    size = index.image_shape[0]
    how = index.resize or "shorter"
    return centre(resized(image, max(size, index.stored_shape[0]), how, name), size)


def _take(samples: Batch, rows: NDArray[np.int64]) -> Batch:
    return Batch(np.take(samples.images, rows, axis=0), samples.labels[rows], samples.ids[rows])


def _put(batch: Batch, places: NDArray[np.int64] | slice, samples: Batch) -> None:
    """Copy samples to these places of a batch."""
    batch.images[places] = samples.images
    batch.labels[places] = samples.labels
    batch.ids[places] = samples.ids


def _check_hash(index: Index, split: Split, shard: Shard) -> None:
    if shard_sha256(index, shard) == shard.sha256:
        return
    for fault in chunk_faults(index, split, shard):
        raise DataError(fault)
    raise DataError(f"{index.folder / shard.file}: {_DIFFERS}; {RESTORE}")


def verify(folder: Path | str) -> list[str]:
    """Return one line per damaged shard and per damaged chunk; an empty list if all are intact.

    Every shard is compared with its SHA-256 in the index, and each chunk of a shard that differs
    is read. Raises DataError for a missing or broken index.
    """
    index = parse_index(folder)
    if fault := reference_fault(index):
        return [fault]
    faults: list[str] = []
    ids = []
    for split in index.splits.values():
        for shard in split.shards:
            try:
                if fault := size_fault(index.folder, shard):
                    raise DataError(fault)
                if shard_sha256(index, shard) == shard.sha256:
                    ids.append(read_shard(index, shard).ids)
                    continue
            except DataError as error:
                faults.append(str(error))
                continue
            damaged = chunk_faults(index, split, shard)
            chunks = (
                "its damaged chunks follow" if damaged else "but the checksums of its chunks match"
            )
            faults.append(f"{index.folder / shard.file}: {_DIFFERS}; {chunks}")
            faults += damaged
    if not faults and len(np.unique(np.concatenate(ids))) != sum(map(len, ids)):
        faults.append(f"{folder}: two samples have the same id; pack the data set again")
    return list(dict.fromkeys(faults))  # all shards may have the same, of a user's file


def info(folder: Path | str) -> dict[str, Any]:
    """Return a description of the data set, ready for JSON; raise DataError as read_index does."""
    index = read_index(folder)
    splits = {
        name: {
            "count": split.count,
            "shards": len(split.shards),
            "bytes": sum(shard.bytes for shard in split.shards),
            "chunk_rows": split.chunk_rows,
        }
        for name, split in index.splits.items()
    }
    return {
        "folder": str(index.folder),
        "format_version": index.format_version,
        "hash": index.hash,
        "classes": index.classes,
        "class_names": list(index.class_names),
        **({} if index.targets is None else {"targets": str(index.targets)}),
        "image_shape": list(index.image_shape),
        "image_dtype": index.image_dtype,
        "encoding": "raw" if index.resize is None else "jpeg",
        **({} if index.reference is None else {"reference": vars(index.reference)}),
        "resize": index.resize,
        "mean": list(index.mean),
        "std": list(index.std),
        "notes": list(index.notes),
        "splits": splits,
    }


def staged_folder(index: Index, directory: str) -> Path:
    """Return the folder of a data set's copy under a directory, after expanding its $VARIABLES.

    Raises:
        UsageError: if a variable is not set on this host.
    """
    expanded = os.path.expandvars(directory)
    if "$" in expanded:
        raise UsageError(
            f"--stage {directory}: a variable in it is not set on {os.uname().nodename}"
        )
    # Other users can neither read nor replace this user's copy.
    return Path(expanded) / f"hvdtrain-{os.getuid()}-{index.hash[:16]}"


def stage(index: Index, directory: str) -> int:
    """Copy the files that are missing, the index last, and return the bytes copied.

    Existing shards are compared with the SHA-256 in the index, and copied again if they differ.
    Processes that copy the same data set at the same time do not disturb each other.

    Raises:
        DataError: if a shard of the source is damaged, or the copy cannot be written.
        UsageError: as in `staged_folder`, or if another user could change the copy.
    """
    if index.reference is not None:
        raise UsageError(
            f"--stage copies shards, and {index.folder} refers to {index.reference.file}: leave "
            "--stage out, or pack it without --reference"
        )
    folder = staged_folder(index, directory)
    copy = replace(index, folder=folder)
    copied = 0
    try:
        make_own_folder(folder, "--stage")
        for path in folder.glob(".*"):  # of processes that were killed while they copied
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
        for split in index.splits.values():
            for shard in split.shards:
                if size_fault(folder, shard) or shard_sha256(copy, shard) != shard.sha256:
                    _copy(index.folder, folder, shard)
                    copied += shard.bytes
        try:
            is_whole = parse_index(folder).hash == index.hash
        except DataError:
            is_whole = False
        if not is_whole:
            content = (index.folder / INDEX_FILE).read_bytes()
            write_whole(folder / INDEX_FILE, lambda file: file.write(content), PRIVATE)
    except OSError as error:
        raise DataError(
            f"{index.folder} cannot be copied to {folder} on {os.uname().nodename} "
            f"({error.strerror}): leave --stage out, or choose another folder"
        ) from None
    return copied


def _copy(source: Path, target: Path, shard: Shard) -> None:
    def copy(to: IO[bytes]) -> None:
        digest = hashlib.sha256()
        with (source / shard.file).open("rb") as file:
            while block := file.read(_COPY_BYTES):
                digest.update(block)
                to.write(block)
        if digest.hexdigest() != shard.sha256:
            raise DataError(f"{source / shard.file}: {_DIFFERS}; {RESTORE}")

    write_whole(target / shard.file, copy, PRIVATE)
