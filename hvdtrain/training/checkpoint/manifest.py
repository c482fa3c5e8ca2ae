"""What a checkpoint says of itself: its parts with their hashes, and where the run stood."""

import hashlib
import json
import math
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import DataError
from hvdtrain.training.checkpoint.partfile import Damaged, Entry, reading

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 16 * 2**20  # bytes: a real one has some hundred a rank
# Names of files in the checkpoint's own folder: none can lead out of it.
PART_NAME = re.compile(r"part-\d{4,6}\.safetensors")
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """A checkpoint without its tensors.

    Attributes:
        parts: the files that hold the tensors, one a rank of the run that wrote them.
        progress: position, counts and sizes, as the loop keeps them.
        configuration: of that run, by option; a resumed one must have the same.
    """

    parts: tuple[Entry, ...]
    progress: dict[str, Any]
    configuration: dict[str, Any]

    def to_json(self) -> str:
        """The text of the file. Numbers that are none are null: JSON has no others."""
        content = _finite({"format_version": FORMAT_VERSION} | asdict(self))
        return json.dumps(content | {"sha256": _digest(content)}, indent=1, allow_nan=False) + "\n"


def part_name(rank: int) -> str:
    """The name of a rank's part."""
    return f"part-{rank:04d}.safetensors"


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        DataError: if there is none, or it is of another version.
        Damaged: if it is not one.
        Unreadable: if the disk does not give it.
    """
    path = folder / MANIFEST
    try:
        with reading(path):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise Damaged(f"{folder} is no whole checkpoint: its {MANIFEST} is no file")
            if status.st_size > LARGEST_MANIFEST:
                raise Damaged(f"{path} is no manifest: it is larger than any")
            text = path.read_text()
    except UnicodeDecodeError as error:
        raise Damaged(f"{path} cannot be read: {_one_line(error)}") from None
    try:
        return parse(text)
    except DataError as error:
        raise type(error)(f"{path} {error}") from None


def parse(text: str) -> Manifest:
    """The manifest in a text.

    Raises:
        DataError: saying, after the name of the file, what is wrong with it.
    """
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"is no JSON: {_one_line(error)}") from None
    version = _take(content, "format_version", int, lambda value: value >= 1)
    if version != FORMAT_VERSION:
        raise DataError(f"has format version {version}, and this hvdtrain reads {FORMAT_VERSION}")
    entries = _take(content, "parts", list, bool)
    parts = tuple(_entry(entry) for entry in entries)
    if len({part.name for part in parts}) != len(parts):
        raise Damaged("names a part twice")
    progress = _take(content, "progress", dict)
    configuration = _take(content, "configuration", dict)
    said = _take(content, "sha256", str, SHA256.fullmatch)
    if _digest({key: content[key] for key in content if key != "sha256"}) != said:
        raise Damaged("is damaged: its SHA-256 is another")
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
    """A value of an object, of the right type and acceptable."""
    if not isinstance(content, Mapping) or name not in content:
        raise Damaged(f"is no manifest: there is no {name!r} where one belongs")
    value = content[name]
    if not isinstance(value, kind) or isinstance(value, bool) or not accept(value):
        raise Damaged(f"is no manifest: {name!r} cannot be {str(value)[:60]!r}")
    return value


def _digest(content: Mapping[str, Any]) -> str:
    """The SHA-256 of all that a manifest says, however it is laid out."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _finite(value: Any) -> Any:
    """The same without NaN and infinities."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
