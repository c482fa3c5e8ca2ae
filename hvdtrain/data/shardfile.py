"""One shard: an HDF5 file of `images` [n, height, width, channels], `labels` [n] and `ids` [n].

Labels are class numbers, or targets [n, ...] of another form.

A shard of image files has `images` [bytes], the files one after the other, and `ends` [n], where
each of them ends.

Each data set is chunked with Fletcher-32, and the file format (HDF5 1.10 and later) has checksums
over everything else that is read, so that any flipped bit raises an error or has no effect. Files
are opened without locks, which some network file systems lack.
"""

import hashlib
import io
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.index import RESTORE, Index, Shard, Split
from hvdtrain.errors import DataError

DATA_SETS = ("images", "labels", "ids")
CHUNK_BYTES = 2**20  # upper bound of a chunk of images, unless one image is larger
FILES_CHUNK_BYTES = 2**17  # of the bytes of image files, which no chunk of rows is aligned with

# Errors that h5py raises for a file that is damaged or has an unexpected layout.
_READ_ERRORS = (OSError, KeyError, RuntimeError, ValueError, TypeError, AttributeError)


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples: `images` uint8 [n, height, width, channels], `labels` and `ids` int64 [n].

    Labels that are not class numbers have the form of `Index.targets`, [n, ...].
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
        images: NDArray[Any] = np.empty((rows, *index.stored_shape), np.uint8)
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


def encode_shard(samples: Batch, rows: int) -> memoryview:
    """Return the content of the shard file with `samples` in chunks of `rows`, reproducibly.

    The file is made in memory, because HDF5 cannot be closed cleanly on a full disk.
    """
    content = io.BytesIO()
    rows = min(rows, len(samples))
    arrays = {name: getattr(samples, name) for name in DATA_SETS}
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
    for name in names:
        if fault := _storage_fault(file, name):
            return f"holds `{name}` {fault}"
        data_set = file[name]
        expected: tuple[int, ...] = (shard.count,)
        kind = "u" if name == "images" else "i"
        if name == "images":
            is_files = index.resize is not None
            expected = file["images"].shape[:1] if is_files else (shard.count, *index.stored_shape)
        elif name == "labels":
            expected = (shard.count, *index.target_form.shape)
            kind = np.dtype(index.target_form.dtype).kind
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
    for name in DATA_SETS if index.resize is None else DATA_SETS[1:]:
        file[name].read_direct(getattr(batch, name), np.s_[start:stop])
    if index.resize is not None:
        batch.images[:] = _read_files(file, start, stop)
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
