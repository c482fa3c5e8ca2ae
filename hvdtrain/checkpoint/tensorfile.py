"""Files of a checkpoint: tensors, hashed while the disk writes or reads them, and the manifest.

The format of tensors is that of https://github.com/huggingface/safetensors: the length of a JSON
header, the header (dtype, shape and offsets of every tensor), and the tensors' memory. Reading
executes no code. What `read_verified` returns are the bytes that were compared with the hash.

The manifest names the files with their hashes, and holds the progress of the run.
"""

import ctypes
import hashlib
import json
import math
import os
import re
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from hvdtrain.errors import DataError
from hvdtrain.host.files import sync

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 16 * 2**20  # bytes: a real one has a few hundred per rank
# File names only: no name can point outside of the checkpoint's folder.
PART_NAME = re.compile(r"part-\d{4,6}\.safetensors")
SHA256 = re.compile(r"[0-9a-f]{64}")
PAUSES = (0.2, 1.0, 3.0)  # seconds before each further attempt to read
Value = TypeVar("Value")


class Damaged(DataError):
    """A file of a checkpoint with another content than was written."""


class Unreadable(DataError):
    """A file of a checkpoint that the disk cannot read: its content may be intact."""


@dataclass(frozen=True)
class Entry:
    """A file in a manifest: its name, its size, and its SHA-256."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint without its tensors.

    Attributes:
        parts: the files that hold the tensors, one for each rank that wrote.
        progress: position, counts and sizes, as in the training loop.
        configuration: of that run, by option; a resumed run must have the same.
    """

    parts: tuple[Entry, ...]
    progress: dict[str, Any]
    configuration: dict[str, Any]

    def to_json(self) -> str:
        """Return the text of the file. Numbers that are not finite become null, as in JSON."""
        content = _finite({"format_version": FORMAT_VERSION} | asdict(self))
        return json.dumps(content | {"sha256": _digest(content)}, indent=1, allow_nan=False) + "\n"


def part_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"part-{rank:04d}.safetensors"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint's folder.

    Raises:
        DataError: if there is none, or it has another format version.
        Damaged: if it is not a manifest.
        Unreadable: if the disk cannot read it.
    """
    path = folder / MANIFEST
    try:
        with reading(path):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise Damaged(f"{folder} is not complete: its {MANIFEST} is not a file")
            if status.st_size > LARGEST_MANIFEST:
                raise Damaged(f"{path} is not a manifest: it has {status.st_size:,} bytes")
            text = path.read_text()
    except UnicodeDecodeError as error:
        raise Damaged(f"{path} cannot be read: {one_line(error)}") from None
    try:
        return parse_manifest(text)
    except DataError as error:
        raise type(error)(f"{path} {error}") from None


def parse_manifest(text: str) -> Manifest:
    """Return the manifest in a text.

    Raises:
        DataError: what is wrong with the text, to be printed after the name of the file.
    """
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"is not valid JSON: {one_line(error)}") from None
    version = _take(content, "format_version", int, lambda value: 1 <= value < 2**31)
    if version != FORMAT_VERSION:
        raise DataError(f"has format version {version}, and this hvdtrain reads {FORMAT_VERSION}")
    entries = _take(content, "parts", list, bool)
    parts = tuple(_entry(entry) for entry in entries)
    if len({part.name for part in parts}) != len(parts):
        raise Damaged("lists a file twice")
    progress = _take(content, "progress", dict)
    configuration = _take(content, "configuration", dict)
    sha256 = _take(content, "sha256", str, SHA256.fullmatch)
    if _digest({key: content[key] for key in content if key != "sha256"}) != sha256:
        raise Damaged("is damaged: its SHA-256 does not match its content")
    return Manifest(parts, progress, configuration)


def _entry(content: Any) -> Entry:
    return Entry(
        _take(content, "name", str, PART_NAME.fullmatch),
        _take(content, "bytes", int, lambda value: 0 <= value < 2**63),
        _take(content, "sha256", str, SHA256.fullmatch),
    )


def _take(
    content: Any, name: str, kind: type, accept: Callable[[Any], object] = lambda _: True
) -> Any:
    """Return a value of an object, checked for its type and by `accept`."""
    if not isinstance(content, Mapping) or name not in content:
        raise Damaged(f"is not a manifest: {name!r} is missing")
    value = content[name]
    if not isinstance(value, kind) or isinstance(value, bool) or not accept(value):
        raise Damaged(f"is not a manifest: {name!r} cannot be {str(value)[:60]!r}")
    return value


def _digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content, independent of its layout."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _finite(value: Any) -> Any:
    """Return the same value with null for NaN and infinities."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def one_line(error: Exception) -> str:
    """Return the message of an error without line breaks."""
    return " ".join(str(error).split())


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the system's error on reading a file into an error of one line.

    Raises:
        DataError: if it is missing.
        Unreadable: for any other reason.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path} is missing") from None
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None


def patiently(read: Callable[[], Value]) -> Value:
    """Return the result of `read`, trying again if the disk fails: that is often temporary.

    Raises:
        Unreadable: if the last attempt fails, too. Other errors of `read` are raised at once.
    """
    for seconds in PAUSES:
        try:
            return read()
        except Unreadable:
            time.sleep(seconds)
    return read()


# The names of safetensors by those of NumPy; bfloat16 is from ml_dtypes.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
    "complex128": "C128",  # ours: safetensors has no name for it
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "bool": "BOOL",
}
NUMPY_DTYPES = {value: key for key, value in DTYPES.items()}
# What a header of another form or with impossible numbers raises: ValueError is also JSON's.
MALFORMED = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
BLOCK, BLOCKS = 8 * 2**20, 4  # bytes of a read, and blocks in memory while a file is verified
METADATA = "__metadata__"  # texts in a header, of other programs
SYNC_FILE_RANGE_WRITE = 2  # of Linux


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> Entry:
    """Write contiguous arrays, and return once they are on the disk.

    Raises:
        OSError: if the disk is full or not writable.
    """
    text = _header(tensors)
    digest, size, started = hashlib.sha256(), 0, 0
    with path.open("wb") as file, ThreadPoolExecutor(1) as beside:
        for piece in (len(text).to_bytes(8, "little"), text, *map(_memory, tensors.values())):
            beside.submit(digest.update, piece)
            file.write(piece)
            size += len(piece)
            if size - started >= BLOCK:
                file.flush()
                _start_writing(file, started, size - started)
                started = size
        file.flush()
        sync(path)
    return Entry(path.name, size, digest.hexdigest())


def _header(tensors: Mapping[str, np.ndarray]) -> bytes:
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _start_writing(file: IO[bytes], start: int, size: int) -> None:
    """Let the system write bytes of a file now: the disk works while the next ones are copied."""
    if (function := _sync_file_range()) is not None:
        place, length = ctypes.c_int64(start), ctypes.c_int64(size)
        function(file.fileno(), place, length, ctypes.c_uint(SYNC_FILE_RANGE_WRITE))


@cache
def _sync_file_range() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None


def verify(folder: Path, entry: Entry) -> None:
    """Compare a file with its entry in the manifest.

    The file is read from the disk, as far as the system drops its cached copy.

    Raises:
        DataError: if it is missing.
        Damaged: if it differs.
        Unreadable: if the disk cannot read it.
    """
    _read(folder / entry.name, entry, np.empty(min(entry.bytes, BLOCKS * BLOCK), np.uint8))


def read_verified(folder: Path, entry: Entry) -> dict[str, np.ndarray]:
    """Return the tensors of a file that equals its entry in the manifest; they share memory.

    Raises:
        DataError: if it is missing.
        Damaged: if it differs, or holds no tensors.
        Unreadable: if the disk cannot read it.
    """
    path = folder / entry.name
    check_size(path, entry)  # before memory is reserved
    content = np.empty(entry.bytes, np.uint8)
    _read(path, entry, content)
    return _tensors(path, content)


def check_size(path: Path, entry: Entry) -> None:
    """Compare the size of a file with its entry in the manifest.

    Raises:
        DataError, Damaged, Unreadable: as `verify` does.
    """
    with reading(path):
        status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(f"{path} is not a file")
    if status.st_size != entry.bytes:
        raise Damaged(
            f"{path} is damaged: it has {status.st_size:,} bytes instead of {entry.bytes:,}"
        )


def _read(path: Path, entry: Entry, memory: np.ndarray) -> None:
    """Read and verify a file; its start is overwritten where the memory is smaller."""
    check_size(path, entry)
    with reading(path), path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        sha256 = _hash_while_reading(file, memory.data, entry.bytes)
    if sha256 != entry.sha256:
        raise Damaged(f"{path} is damaged: its SHA-256 differs from the manifest")


def _hash_while_reading(file: Any, memory: memoryview, size: int) -> str:
    digest, hashed, place = hashlib.sha256(), deque[Future[None]](), 0
    with ThreadPoolExecutor(1) as beside:
        while place < size:
            if len(hashed) == BLOCKS - 1:
                hashed.popleft().result()  # its memory may be used again now
            start = place % len(memory)
            count = file.readinto(memory[start : start + min(BLOCK, size - place)])
            if not count:
                break  # shorter than it was just now: its hash differs
            hashed.append(beside.submit(digest.update, memory[start : start + count]))
            place += count
    return digest.hexdigest()


def _tensors(path: Path, content: np.ndarray) -> dict[str, np.ndarray]:
    try:
        length = int.from_bytes(content[:8].tobytes(), "little")
        if length > content.size - 8:
            raise ValueError("its header is longer than the file")
        header = json.loads(content[8 : 8 + length].tobytes())
        data = content[8 + length :]
        return {
            name: _tensor(data, form["dtype"], form["shape"], form["data_offsets"])
            for name, form in header.items()
            if name != METADATA
        }
    except MALFORMED as error:
        raise Damaged(f"{path} cannot be read: {one_line(error)}") from None


def _tensor(data: np.ndarray, dtype: str, shape: list[int], offsets: list[int]) -> np.ndarray:
    start, end = offsets
    if not 0 <= start <= end <= data.size or not all(type(size) is int for size in shape):
        raise ValueError("a tensor lies outside of the file")
    if any(size < 0 for size in shape):
        raise ValueError("a shape is negative")
    tensor = data[start:end].view(_numpy_dtype(dtype)).reshape(shape)
    return tensor if tensor.flags.aligned else tensor.copy()


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name == "BF16":
        import ml_dtypes

        brain_float: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return brain_float
    return np.dtype(NUMPY_DTYPES[name])


def _memory(tensor: np.ndarray) -> Any:
    """Return the tensor's bytes, without a copy."""
    return tensor.reshape(-1).view(np.uint8)
