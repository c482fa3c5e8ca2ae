"""One rank's file of a checkpoint: a safetensors file, written and hashed in one pass.

The format is https://github.com/huggingface/safetensors: the length of a JSON header, the header
(dtype, shape and offsets of every tensor), and the tensors' memory. Reading executes no code.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hvdtrain.errors import DataError

# The names of safetensors by those of NumPy; bfloat16 is from ml_dtypes.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
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


def write(path: Path, tensors: Mapping[str, np.ndarray]) -> Entry:
    """Write contiguous arrays, and return once they are on the disk.

    Raises:
        OSError: if the disk is full or not writable.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        pieces: tuple[Any, ...] = (len(text).to_bytes(8, "little"), text)
        pieces += tuple(map(_memory, tensors.values()))
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return Entry(path.name, size, digest.hexdigest())


def verify(folder: Path, entry: Entry) -> None:
    """Compare a file with its entry in the manifest.

    The file is read from the disk, as far as the system drops its cached copy.

    Raises:
        DataError: if it is missing.
        Damaged: if it differs.
        Unreadable: if the disk cannot read it.
    """
    path = folder / entry.name
    with reading(path):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise Damaged(f"{path} is not a file")
        if status.st_size != entry.bytes:
            raise Damaged(
                f"{path} is damaged: it has {status.st_size:,} bytes instead of {entry.bytes:,}"
            )
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != entry.sha256:
        raise Damaged(f"{path} is damaged: its SHA-256 differs from the manifest")


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


def read(path: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Return the tensors of a file, or only those in `names`.

    Raises:
        Damaged, Unreadable: if it cannot be read.
    """
    with _open(path) as file:
        held = [name for name in file.keys() if names is None or name in names]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in held}


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a file, without reading the tensors.

    Raises:
        Damaged, Unreadable: if it cannot be read.
    """
    with _open(path) as file:
        return {
            name: tuple(file.get_slice(name).get_shape())
            for name in file.keys()  # noqa: SIM118
        }


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="np") as file:
            yield file
    except Exception as error:  # safetensors has its own, and NumPy raises for unknown dtypes
        kind = Unreadable if isinstance(error, OSError) else Damaged
        raise kind(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def _memory(tensor: np.ndarray) -> Any:
    """Return the tensor's bytes, without a copy."""
    return tensor.reshape(-1).view(np.uint8)
