"""One rank's part of a checkpoint: a safetensors file, written and hashed in one pass.

The format is https://github.com/huggingface/safetensors: the length of a JSON header, the header
(dtype, shape and place of every tensor), and the tensors' memory. Nothing in it is ever executed.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.errors import DataError

# By the names of NumPy; bfloat16 is that of ml_dtypes.
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


@dataclass(frozen=True)
class Entry:
    """What a manifest says of a part: the file's name, its size, and its SHA-256."""

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
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
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
    """Compare a part with what its manifest says.

    Raises:
        DataError: if it is missing, or differs.
    """
    path = folder / entry.name
    try:
        if path.is_symlink() or not path.is_file():
            raise DataError(f"{path} is missing" if not path.exists() else f"{path} is no file")
        if path.stat().st_size != entry.bytes:
            raise DataError(
                f"{path} is damaged: it has {path.stat().st_size:,} bytes instead of "
                f"{entry.bytes:,}"
            )
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if digest != entry.sha256:
        raise DataError(f"{path} is damaged: its SHA-256 is not that of the manifest")


def read(path: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The tensors of a part, or those of `names` that it holds.

    Raises:
        DataError: if it cannot be read.
    """
    with _open(path) as file:
        held = [name for name in file.keys() if names is None or name in names]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in held}


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a part, without reading it.

    Raises:
        DataError: if it cannot be read.
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
    except Exception as error:  # of the library, and of NumPy for what was never written
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def _memory(tensor: np.ndarray) -> Any:
    """The tensor's bytes, in place."""
    return tensor.reshape(-1).view(np.uint8)
