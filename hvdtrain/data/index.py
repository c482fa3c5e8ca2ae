"""The index of a packed data set, `index.json`, which is validated when it is read.

The index names the shards of each split with their size and hash, and holds everything that a run
needs before it opens a shard. Its own hash identifies the data set: the order of samples is a
function of it (order.py).
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import records

INDEX_FILE = "index.json"
Resize = Literal["shorter", "squash", "pad"]
Encoding = Literal["raw", "jpeg"]

FORMAT_VERSION = 1  # of pixels
FILES_VERSION = 2  # of image files, which are decoded while they are loaded
REFERENCE_VERSION = 3  # of a user's HDF5 file, which is read in place
SPLITS = ("train", "test")
RESTORE = "restore the file or pack the data set again"
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm")

_INDEX_BYTES = 64 * 2**20  # hvdtrain writes no larger index
_LARGEST = 2**48  # rows or bytes
_LONGEST_SIDE = 2**16  # pixels
LARGEST_VALUE = sys.float_info.max
_MOST_DIMENSIONS = 8  # of a target
_LOOKED_AT = 1000  # files in a folder without an index
# A plain name, without a folder.
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.h5")
_HASH = re.compile(r"[0-9a-f]{64}")


UNIT = 255  # the value of white in a pixel
# (channels, height, width) of inputs, or the side of square images of three channels.
InputSize = int | tuple[int, int, int]
# The types of inputs and targets, with the bytes of a value.
TARGET_TYPES = {"uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8} | {
    "float16": 2,
    "float32": 4,
    "float64": 8,
}


def size_of(shape: Sequence[int]) -> InputSize:
    """Return the size of inputs that are stored as [height, width, channels]."""
    height, width, channels = shape
    return height if (width, channels) == (height, 3) else (channels, height, width)


@dataclass(frozen=True)
class TargetForm:
    """The form of a sample's target: a class label, or an array of numbers.

    Attributes:
        shape: of the target of one sample; () for a single number.
        dtype: of its values in memory.
        outputs: what a model's function gets as the number of classes: the classes of whole
            numbers, else the values of a target.
    """

    shape: tuple[int, ...]
    dtype: str
    outputs: int

    @property
    def bytes(self) -> int:
        """Bytes of a target."""
        return math.prod(self.shape) * TARGET_TYPES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


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
class Reference:
    """A user's HDF5 file, which holds the inputs of a data set in place of its shards.

    Attributes:
        file: its absolute path.
        data_sets: the name of its data set, by split.
    """

    file: str
    data_sets: dict[str, str]


@dataclass(frozen=True)
class Index:
    """A packed data set.

    `image_shape` is (height, width, channels) of the images that are read, or of other inputs,
    whose numbers are of `image_dtype`. `mean` and `std` are per channel over the train split,
    of pixels in 0..1, of other inputs in their own unit (a constant channel has std 1). `notes`
    are remarks for the user, such as an incomplete source. `resize` is how image files get their
    size when they are decoded, and None for a data set of pixels. `packed_shape` is the shape in
    `index.json`, where `at_size` chose another one to read. `targets` is the form of arrays in the
    place of class labels, for which there are no `class_names`; None for class labels.
    `reference` is the file that the shards refer to; None if they hold everything.
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
    targets: TargetForm | None = None
    image_dtype: str = "uint8"
    reference: Reference | None = None

    @property
    def input_size(self) -> InputSize:
        """Return the size of inputs, as a model's function gets it."""
        return size_of(self.image_shape)

    @property
    def classes(self) -> int:
        """Number of classes, or of a model's outputs for other targets."""
        return self.target_form.outputs

    @property
    def target_form(self) -> TargetForm:
        """The form of a sample's target, also of class labels."""
        return self.targets or TargetForm((), "int64", len(self.class_names))

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """The image shape in `index.json`."""
        return self.packed_shape or self.image_shape

    @property
    def image_bytes(self) -> int:
        """Bytes of one stored image; of image files the average over the train split."""
        if self.resize is None:
            return math.prod(self.stored_shape) * TARGET_TYPES[self.image_dtype]
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
        if (channels, self.image_dtype) != (3, "uint8"):
            raise UsageError(
                f"--image-size {size}: the inputs of {self.folder} are no images: leave it out"
            )
        if self.resize is None and size > min(height, width):
            raise UsageError(
                f"--image-size {size}, but the images of {self.folder} are {height}x{width}: "
                f"pack them with --size {size}"
            )
        shape = (size, size, channels)
        return replace(self, image_shape=shape, packed_shape=self.stored_shape)

    def normalisation(self, how: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the values to subtract from each channel, of pixels in 0..1, and to divide by.

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
        """SHA-256 (hex) of the canonical content of the index, wherever its files are."""
        content = {key: value for key, value in self.to_json().items() if key != "reference"}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the content of `index.json`."""
        files = {} if self.resize is None else {"encoding": "jpeg", "resize": self.resize}
        targets = (
            {}
            if self.targets is None
            else {"targets": vars(self.targets) | {"shape": list(self.targets.shape)}}
        )
        dtype = {} if self.image_dtype == "uint8" else {"image_dtype": self.image_dtype}
        reference = {} if self.reference is None else {"reference": vars(self.reference)}
        return {
            "format_version": self.format_version,
            **files,
            **targets,
            **dtype,
            **reference,
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
    if fault := reference_fault(index):
        raise DataError(fault)
    return index


def reference_fault(index: Index) -> str | None:
    """Return why the file that the shards refer to cannot be opened; None if there is no fault."""
    if index.reference is None:
        return None
    try:
        Path(index.reference.file).open("rb").close()
    except OSError as error:
        reason = f"{index.folder} refers to it, and it cannot be opened ({error.strerror})"
        return f"{index.reference.file}: {reason}; {RESTORE}"
    return None


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
        return _index(folder, text)
    except ValueError as error:
        raise DataError(
            f"{path}: not an index of hvdtrain ({error}); pack the data set again"
        ) from error


def _holds_images(folder: Path) -> bool:
    """Return whether one of the first files here, or in two levels of folders, is an image."""
    patterns = ("*", "*/*", "*/*/*")
    try:
        paths = (path for pattern in patterns for path in islice(folder.glob(pattern), _LOOKED_AT))
        return any(path.suffix.lower() in IMAGE_SUFFIXES for path in paths)
    except OSError:
        return False


@dataclass(frozen=True)
class _SplitFile:
    """A split in `index.json`."""

    count: int
    chunk_rows: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class _IndexFile:
    """The content of `index.json`."""

    format_version: int
    image_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...]
    splits: dict[str, _SplitFile]
    resize: Resize | None = None
    targets: TargetForm | None = None
    image_dtype: str = "uint8"
    reference: Reference | None = None


def _index(folder: Path, text: bytes) -> Index:
    """Return the index in a text; raise ValueError, with the reason, if it breaks a rule."""
    if len(text) > _INDEX_BYTES:
        raise ValueError(f"larger than {_INDEX_BYTES:,} bytes")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    version = value.get("format_version") if isinstance(value, dict) else FORMAT_VERSION
    if version not in (FORMAT_VERSION, FILES_VERSION, REFERENCE_VERSION):
        known = f"this hvdtrain reads {FORMAT_VERSION} to {REFERENCE_VERSION}"
        raise ValueError(f"format version {str(version)[:40]}, {known}")
    content: _IndexFile = records.build(_IndexFile, value, "the file")
    for fault in _faults(content):
        raise ValueError(fault)
    height, width, channels = content.image_shape
    splits = {
        name: Split(name, split.count, split.shards, split.chunk_rows)
        for name, split in content.splits.items()
    }
    fields = vars(content) | {"image_shape": (height, width, channels), "splits": splits}
    index = Index(folder, **fields)
    if index.to_json() != value:
        raise ValueError("the file has unknown keys")
    return index


def _faults(content: _IndexFile) -> Iterator[str]:
    """Yield the rules that an index breaks; those after the first one may be wrong."""
    if len(content.image_shape) != 3 or not _are_whole(content.image_shape, _LONGEST_SIDE):
        yield "`image_shape` is not [height, width, channels]"
    height, width, channels = content.image_shape
    if not len(content.mean) == len(content.std) == channels:
        yield "`mean` or `std` is not one number per channel"
    is_pixels = content.image_dtype == "uint8"
    if content.image_dtype not in TARGET_TYPES:
        yield "`image_dtype` is not a type of numbers"
    least, most = (0.0, 1.0) if is_pixels else (-LARGEST_VALUE, LARGEST_VALUE)
    if not all(least <= number <= most for number in content.mean):
        yield "`mean` is out of range"
    if not all(0 < number <= most for number in content.std):
        yield "`std` is not above 0, or out of range"
    targets = content.targets
    if bool(content.class_names) == (targets is not None):
        yield "`class_names` is empty" if targets is None else "it has classes and `targets`"
    if targets and not (
        targets.dtype in TARGET_TYPES
        and _are_whole((*targets.shape, targets.outputs), _LONGEST_SIDE**2)
        and len(targets.shape) <= _MOST_DIMENSIONS
    ):
        yield "`targets` has an unknown type, or a shape out of range"
    if not all(map(str.isprintable, (*content.class_names, *content.notes))):
        yield "`class_names` or `notes` is not a line of text"
    is_files = content.format_version == FILES_VERSION
    if content.resize not in (get_args(Resize) if is_files else (None,)):
        yield "`resize` is not shorter, squash or pad"
    if is_files and not (height == width and channels == 3 and is_pixels):
        yield "`image_shape` is not a square of 3 channels"
    if content.splits.keys() != set(SPLITS):
        yield "`splits` are not `train` and `test`"
    reference, is_reference = content.reference, content.format_version == REFERENCE_VERSION
    if is_reference != (reference is not None and reference.data_sets.keys() == set(SPLITS)):
        yield "`reference` does not name a data set for `train` and `test`"
    image_bytes = 1
    if not (is_files or is_reference):
        image_bytes = math.prod(content.image_shape) * TARGET_TYPES[content.image_dtype]
    for name, split in content.splits.items():
        for shard in split.shards:
            if not _SHARD_NAME.fullmatch(shard.file):
                yield f"{shard.file[:40]!r} is not a valid name of a shard"
            if not _HASH.fullmatch(shard.sha256):
                yield f"`sha256` of {shard.file} is not 64 hex digits"
            if not _are_whole((shard.count, shard.bytes)):
                yield f"`count` or `bytes` of {shard.file} is not above 0"
            # Images are stored uncompressed, so a count that is too large is detected here.
            if shard.count * image_bytes > shard.bytes:
                yield f"{shard.file} is too small for {shard.count} images"
        if not _are_whole((split.count, split.chunk_rows)):
            yield f"`count` or `chunk_rows` of split `{name}` is not above 0"
        if sum(shard.count for shard in split.shards) != split.count:
            yield f"counts in split `{name}` disagree"
        if any(shard.count % split.chunk_rows for shard in split.shards[:-1]):
            yield f"a shard of split `{name}` ends inside a chunk"
    files = [shard.file for split in content.splits.values() for shard in split.shards]
    if len(files) != len(set(files)):
        yield "two shards have the same name"


def _are_whole(numbers: Sequence[int], largest: int = _LARGEST) -> bool:
    return all(1 <= number <= largest for number in numbers)
