"""The manifest of a checkpoint: its files with their hashes, and the progress of the run."""

import hashlib
import json
import math
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.errors import DataError

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
    version = _take(content, "format_version", int, lambda value: value >= 1)
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
