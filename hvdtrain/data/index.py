"""The index of a packed data set, `index.json`, which is validated when it is read.

The index names the shards of each split with their size and hash, and holds everything that a run
needs before it opens a shard. Its own hash identifies the data set: the order of samples is a
function of it (order.py).
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from hvdtrain.errors import DataError, UsageError

INDEX_FILE = "index.json"
Resize = Literal["shorter", "squash", "pad"]
Encoding = Literal["raw", "jpeg"]

FORMAT_VERSION = 1  # of pixels
FILES_VERSION = 2  # of image files, which are decoded while they are loaded
SPLITS = ("train", "test")
RESTORE = "restore the file or pack the data set again"
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm")

_INDEX_BYTES = 64 * 2**20  # hvdtrain writes no larger index
_LARGEST = 2**48  # rows or bytes
_LONGEST_SIDE = 2**16  # pixels
_LOOKED_AT = 1000  # files in a folder without an index
_SHARD_NAME = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.h5"
)  # a plain name, without a folder
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Shard:
    """One HDF5 file: its plain name, number of samples, size in bytes and SHA-256 (hex)."""

    file: str
    count: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """A split: `count` samples in `shards`, in order; a chunk holds `chunk_rows` samples.

    Every shard but the last holds whole chunks, so that chunk k of the split is rows
    [k * chunk_rows, (k + 1) * chunk_rows) and lies in one file.
    """

    name: str
    count: int
    shards: tuple[Shard, ...]
    chunk_rows: int


@dataclass(frozen=True)
class Index:
    """A packed data set.

    `image_shape` is (height, width, channels) of the images that are read. `mean` and `std` are
    per channel over the train split, of pixels in 0..1 (a constant channel has std 1). `notes` are
    remarks for the user, such as an incomplete source. `resize` is how image files get their size
    when they are decoded, and None for a data set of pixels. `packed_shape` is the shape in
    `index.json`, where `at_size` chose another one to read.
    """

    folder: Path
    format_version: int
    splits: Mapping[str, Split]
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...] = ()
    resize: Resize | None = None
    packed_shape: tuple[int, int, int] | None = None

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """The image shape in `index.json`."""
        return self.packed_shape or self.image_shape

    @property
    def image_bytes(self) -> int:
        """Bytes of one stored image; of image files the average over the train split."""
        if self.resize is None:
            return math.prod(self.stored_shape)
        train = self.splits["train"]
        return max(1, sum(shard.bytes for shard in train.shards) // train.count)

    def at_size(self, size: int | None) -> "Index":
        """Return the same data set, read as squares of `size` pixels; None for the size in it.

        Smaller images are the centres of the stored ones. Image files can be read at any size:
        they are scaled to the stored size or to `size`, whichever is larger. The hash stays.

        Raises:
            UsageError: for pixels that are smaller than `size`.
        """
        height, width, channels = self.stored_shape
        if size is None or (size, size) == (height, width):
            return replace(self, image_shape=self.stored_shape, packed_shape=None)
        if self.resize is None and size > min(height, width):
            raise UsageError(
                f"--image-size {size}, but the images of {self.folder} are {height}x{width}: "
                f"pack them with --size {size}"
            )
        shape = (size, size, channels)
        return replace(self, image_shape=shape, packed_shape=self.stored_shape)

    def normalisation(self, how: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the values to subtract from each channel of pixels in 0..1, and then divide by.

        They are 0 and 1 for "unit", and the train split's mean and deviation for "meanstd". Raises
        UsageError for anything else.
        """
        if how == "meanstd":
            return self.mean, self.std
        if how != "unit":
            raise UsageError(f"unknown normalisation {how!r}: use unit or meanstd")
        return (0.0,) * len(self.mean), (1.0,) * len(self.std)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) of the canonical content of the index, without its folder."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the content of `index.json`."""
        files = {} if self.resize is None else {"encoding": "jpeg", "resize": self.resize}
        return {
            "format_version": self.format_version,
            **files,
            "image_shape": list(self.stored_shape),
            "class_names": list(self.class_names),
            "mean": list(self.mean),
            "std": list(self.std),
            "notes": list(self.notes),
            "splits": {
                name: {
                    "count": split.count,
                    "chunk_rows": split.chunk_rows,
                    "shards": [vars(shard) for shard in split.shards],
                }
                for name, split in self.splits.items()
            },
        }


def read_index(folder: Path | str) -> Index:
    """Return the index of the data set in `folder`, after a check of the shards' sizes.

    Raises DataError (one line) for a missing folder or index, content that breaks a rule of the
    format, and a shard that is missing or has another size. The contents of shards are checked
    when they are read.
    """
    index = parse_index(folder)
    for split in index.splits.values():
        for shard in split.shards:
            if fault := size_fault(index.folder, shard):
                raise DataError(f"{fault}; {RESTORE}")
    return index


def size_fault(folder: Path, shard: Shard) -> str | None:
    """Return what is wrong with a shard's file by its metadata; None if nothing is."""
    path = folder / shard.file
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path}: shard is missing ({error.strerror})"
    if not path.is_file():
        return f"{path}: shard is not a file"
    if size != shard.bytes:
        kind = "truncated" if size < shard.bytes else "another file"
        return f"{path}: shard is {kind}: {size:,} bytes, not the {shard.bytes:,} of the index"
    return None


def parse_index(folder: Path | str) -> Index:
    """Return the index as `read_index` does, without checking the shards."""
    folder = Path(folder)
    path = folder / INDEX_FILE
    pack = "make a data set with `hvdtrain data pack` or `hvdtrain data synth`"
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; {pack}")
    if not path.is_file():
        if _holds_images(folder):
            raise DataError(
                f"{folder}: holds images and no {INDEX_FILE}: pack them with "
                f"`hvdtrain data pack {folder} DEST`, and use DEST"
            )
        raise DataError(f"{folder}: holds no {INDEX_FILE}; {pack}")
    try:
        with path.open("rb") as file:
            text = file.read(_INDEX_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        if len(text) > _INDEX_BYTES:
            raise _BrokenIndex(f"larger than {_INDEX_BYTES:,} bytes")
        return _index(folder, json.loads(text))
    except (_BrokenIndex, ValueError, RecursionError) as error:
        reason = "not JSON" if not isinstance(error, _BrokenIndex) else str(error)
        raise DataError(
            f"{path}: not an index of hvdtrain ({reason}); pack the data set again"
        ) from error


def _holds_images(folder: Path) -> bool:
    """Return whether one of the first files here, or in two levels of folders, is an image."""
    patterns = ("*", "*/*", "*/*/*")
    try:
        paths = (path for pattern in patterns for path in islice(folder.glob(pattern), _LOOKED_AT))
        return any(path.suffix.lower() in IMAGE_SUFFIXES for path in paths)
    except OSError:
        return False


class _BrokenIndex(Exception):
    """A broken rule of the format; the message names the rule and the place."""


def _require(fulfilled: bool, rule: str) -> None:
    if not fulfilled:
        raise _BrokenIndex(rule)


def _object(value: object, where: str, keys: set[str]) -> dict[str, Any]:
    """Return a JSON object after a check that it has exactly these keys."""
    if not isinstance(value, dict):
        raise _BrokenIndex(f"{where} is not an object")
    for key in sorted(keys - value.keys()):
        raise _BrokenIndex(f"{where} has no `{key}`")
    for key in sorted(value.keys() - keys):
        raise _BrokenIndex(f"{where} has an unknown key {key[:40]!r}")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _BrokenIndex(f"{where} is not a list")
    return value


def _whole(value: object, where: str, largest: int = _LARGEST) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise _BrokenIndex(f"{where} is not a whole number from 1 to {largest}")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise _BrokenIndex(f"{where} is not a line of text")
    return value


def _number(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise _BrokenIndex(f"{where} is not between 0 and 1")
    return float(value)


def _index(folder: Path, value: object) -> Index:
    """Return the index that a JSON value describes; raise _BrokenIndex if it breaks a rule."""
    version = value.get("format_version") if isinstance(value, dict) else FORMAT_VERSION
    if version not in (FORMAT_VERSION, FILES_VERSION) or isinstance(version, bool):
        text = f"this hvdtrain reads {FORMAT_VERSION} and {FILES_VERSION}"
        raise _BrokenIndex(f"format version {str(version)[:40]}, {text}")
    keys = {"format_version", "image_shape", "class_names", "mean", "std", "notes", "splits"}
    is_files = version == FILES_VERSION
    keys |= {"encoding", "resize"} if is_files else set()
    top = _object(value, "the file", keys)
    height, width, channels = _image_shape(top["image_shape"])
    mean = tuple(_number(number, "`mean`") for number in _list(top["mean"], "`mean`"))
    std = tuple(_number(number, "`std`") for number in _list(top["std"], "`std`"))
    _require(len(mean) == len(std) == channels, "`mean` or `std` is not one number per channel")
    _require(min(std) > 0, "`std` is not above 0")
    names = [_text(name, "`class_names`") for name in _list(top["class_names"], "`class_names`")]
    _require(len(names) > 0, "`class_names` is empty")
    notes = tuple(_text(note, "`notes`") for note in _list(top["notes"], "`notes`"))
    splits = _object(top["splits"], "`splits`", set(SPLITS))
    resize = top.get("resize")
    if is_files:
        _require(top["encoding"] == "jpeg", "`encoding` is not jpeg")
        _require(resize in get_args(Resize), "`resize` is not shorter, squash or pad")
        _require(height == width and channels == 3, "`image_shape` is not a square of 3 channels")
    image_bytes = 1 if is_files else height * width * channels
    parsed = {name: _split(name, splits[name], image_bytes) for name in SPLITS}
    files = [shard.file for split in parsed.values() for shard in split.shards]
    _require(len(files) == len(set(files)), "two shards have the same name")
    return Index(
        folder=folder,
        format_version=version,
        splits=parsed,
        class_names=tuple(names),
        image_shape=(height, width, channels),
        mean=mean,
        std=std,
        notes=notes,
        resize=resize,
    )


def _image_shape(value: object) -> tuple[int, ...]:
    sides = _list(value, "`image_shape`")
    _require(len(sides) == 3, "`image_shape` is not [height, width, channels]")
    return tuple(_whole(side, "`image_shape`", _LONGEST_SIDE) for side in sides)


def _split(name: str, value: object, image_bytes: int) -> Split:
    where = f"split `{name}`"
    fields = _object(value, where, {"count", "chunk_rows", "shards"})
    count = _whole(fields["count"], f"`count` of {where}")
    chunk_rows = _whole(fields["chunk_rows"], f"`chunk_rows` of {where}")
    shards = tuple(_shard(shard, where, image_bytes) for shard in _list(fields["shards"], where))
    _require(sum(shard.count for shard in shards) == count, f"counts in {where} disagree")
    whole = all(shard.count % chunk_rows == 0 for shard in shards[:-1])
    _require(whole, f"a shard of {where} ends inside a chunk")
    return Split(name, count, shards, chunk_rows)


def _shard(value: object, where: str, image_bytes: int) -> Shard:
    fields = _object(value, f"a shard of {where}", {"file", "count", "bytes", "sha256"})
    file, sha256 = fields["file"], fields["sha256"]
    plain = isinstance(file, str) and _SHARD_NAME.fullmatch(file) is not None
    _require(plain, f"{str(file)[:40]!r} is not a valid name of a shard")
    hashed = isinstance(sha256, str) and _HASH.fullmatch(sha256) is not None
    _require(hashed, f"`sha256` of {file} is not 64 hex digits")
    count = _whole(fields["count"], f"`count` of {file}")
    size = _whole(fields["bytes"], f"`bytes` of {file}")
    # Images are stored uncompressed, so a count that is too large is detected here.
    _require(count * image_bytes <= size, f"{file} is too small for {count} images")
    return Shard(file, count, size, sha256)
