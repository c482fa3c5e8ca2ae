"""Data sets from memory: `.npy` and `.npz` files, and Python iterators of (image, label)."""

import math
import operator
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hvdtrain.data.images import check_size, pixels, resize, rgb, shown
from hvdtrain.data.index import SPLITS, TARGET_TYPES, Index, Resize, TargetForm
from hvdtrain.data.listing import ALONE, MOST_CLASSES, TEST_FOLDERS, labels_of
from hvdtrain.data.writer import Layout, in_order, write_sources
from hvdtrain.errors import DataError, UsageError

# The names of the arrays of a split; `{}` is the split, and missing in a source without splits.
_NAMES = (("{}_images", "{}_labels"), ("x_{}", "y_{}"), ("X_{}", "y_{}"))
_NAMES_ALONE = (("images", "labels"), ("x", "y"), ("X", "y"), ("data", "labels"))
_MOST_HEADER = 2**16
_BLOCK_BYTES = 2**22


def write(
    destination: Path | str,
    splits: Mapping[str, Iterable[tuple[Any, int]]],
    class_names: Sequence[str] | None = None,
    *,
    size: int | None = None,
    resize: Resize = "shorter",
    shard_mb: int = 64,
) -> Index:
    """Pack images of a Python iterator; return the index of the data set.

    An iterator is read once, from its start to its end, and holds one shard in memory at a time.

    Args:
        destination: new folder for the shards.
        splits: `train` and `test`, each an iterable of (image, label). An image is a Pillow image,
            or uint8 [height, width, 3]; grey values and an alpha channel are converted. A label is
            a whole number from 0.
        class_names: names of the classes; None for `class 0`, `class 1` and so on.
        size: side in pixels that images are resized to; None if all have one size.
        resize: how, as in `hvdtrain.data.resize`.
        shard_mb: size of a shard in MiB.

    Raises:
        UsageError: for other splits than `train` and `test`, a size out of range, or a class name
            that is not a line of text.
        DataError: if a split is empty, an image or label cannot be used, or the destination holds
            a data set already or cannot be written: then no written file is left behind.
    """
    if set(splits) != set(SPLITS):
        raise UsageError(
            f"splits {', '.join(map(str, splits)) or 'none'}: give `train` and `test`"
        )
    if size is not None:
        check_size(size, resize)
    for name in () if class_names is None else class_names:
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise UsageError(f"class name {name!r}: give each class a name, as one line of text")
    streams = {name: _samples(name, iter(splits[name]), size, resize) for name in SPLITS}
    first = next(streams["train"], None)
    shape = (1, 1, 3) if first is None else first[0].shape
    streams["train"] = chain([] if first is None else [first], streams["train"])
    sources = {name: in_order(_parts(name, streams[name], shape)) for name in SPLITS}
    return write_sources(destination, sources, Layout(shape, shard_mb=shard_mb), class_names)


def _samples(
    name: str, samples: Iterator[tuple[Any, int]], size: int | None, how: Resize
) -> Iterator[tuple[NDArray[np.uint8], int]]:
    """Yield checked images, resized, and labels of a split; `name` is that of the split."""
    for place, sample in enumerate(samples):
        try:
            image, label = sample
            is_pillow = isinstance(image, Image.Image)
            made = pixels(np.array(rgb(image)) if is_pillow else np.asarray(image))
            number = operator.index(label)
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"sample {place} of `{name}` cannot be used: {reason}") from error
        if not -MOST_CLASSES < number < MOST_CLASSES:
            raise DataError(
                f"sample {place} of `{name}` has label {number}: give whole numbers "
                f"from 0 to {MOST_CLASSES - 1}"
            )
        if size is not None:
            made = resize(made, size, how, f"sample {place} of `{name}`")
        yield made, number


def _parts(
    name: str, samples: Iterator[tuple[NDArray[np.uint8], int]], shape: tuple[int, int, int]
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Yield the samples in arrays of a few; raise DataError for an image of another shape."""
    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for place, (image, label) in enumerate(samples):
        if image.shape != shape:
            (height, width), first = image.shape[:2], "x".join(map(str, shape[:2]))
            raise DataError(
                f"sample {place} of `{name}`: image of {height}x{width} pixels, others "
                f"have {first}: give a size for all (size=N)"
            )
        images.append(image)
        labels.append(label)
        if len(images) * image.size >= _BLOCK_BYTES:
            yield np.stack(images), np.array(labels)
            images, labels = [], []
    if images:
        yield np.stack(images), np.array(labels)


@dataclass(frozen=True)
class Array:
    """An array in a file, whose header is read: images, or their labels or other targets.

    Attributes:
        place: how messages name it.
        member: its name in an .npz archive.
    """

    place: str
    path: Path
    member: str | None
    shape: tuple[int, ...] = ()
    is_fortran: bool = False
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.uint8))

    def with_header(self) -> "Array":
        """Return the array with what its file says; raise DataError if it has no header."""
        with _reading(self.place), self._opened() as file:
            shape, is_fortran, dtype = _header(file)
            return replace(self, shape=shape, is_fortran=is_fortran, dtype=dtype)

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        with self.path.open("rb") as file:
            if self.member is None:
                yield file
                return
            with zipfile.ZipFile(file) as archive, archive.open(self.member) as content:
                yield content

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        """Yield all rows in blocks of `rows`; raise DataError if the file is damaged."""
        with _reading(self.place), self._opened() as file:
            _header(file)
            for start in range(0, self.shape[0], rows):
                shape = (min(rows, self.shape[0] - start), *self.shape[1:])
                size = math.prod(shape) * self.dtype.itemsize
                content = file.read(size)
                if len(content) < size:
                    raise DataError(f"{self.place}: is truncated")
                yield np.frombuffer(content, self.dtype).reshape(shape)
            if file.read(1):  # an archive has its checksum at the end
                raise DataError(f"{self.place}: is damaged: it is longer than its header says")

    def check_images(self) -> None:
        """Raise DataError if images cannot be made of it."""
        fault = None
        if self.is_fortran and len(self.shape) > 1:
            fault = "its order is Fortran's: save np.ascontiguousarray(array)"
        elif not self.shape or not self.shape[0]:
            fault = "holds no images"
        else:
            try:
                pixels(np.empty([min(side, 5) for side in self.shape[1:]], self.dtype))
            except ValueError:
                fault = (
                    f"images of {self.dtype} {list(self.shape)}: save uint8 [n, height, width, 3]"
                )
        if fault:
            raise DataError(f"{self.place}: {fault}")

    def images(self) -> Iterator[NDArray[np.uint8]]:
        """Yield all images as RGB, uint8 [n, height, width, 3], a few at a time.

        Raises:
            DataError: if the file is damaged.
        """
        for block in self.blocks(max(1, _BLOCK_BYTES // math.prod(self.shape[1:]))):
            yield np.stack([pixels(image) for image in block])

    @property
    def holds_targets(self) -> bool:
        """Return whether its rows are no class labels: floating numbers, or several numbers."""
        is_label = len(self.shape) == 1 or self.shape[1:] == (1,)
        return self.dtype.kind == "f" or (self.dtype.kind in "iu" and not is_label)

    def targets(self, count: int) -> NDArray[Any]:
        """Return the targets of `count` images.

        Raises:
            DataError: if it holds no such targets, or the file is damaged.
        """
        if self.dtype.name not in TARGET_TYPES or self.shape[:1] != (count,) or self.is_fortran:
            raise DataError(
                f"{self.place}: {self.dtype} {list(self.shape)} are not the targets of {count:,} "
                f"images: save one {', '.join(TARGET_TYPES)} array for all, in C order"
            )
        (array,) = self.blocks(count)
        if not np.isfinite(array).all():
            row = int(np.argwhere(~np.isfinite(array))[0][0])
            raise DataError(f"{self.place}: the target of sample {row} is not finite: correct it")
        return array

    def labels(self, count: int) -> list[str]:
        """Return the labels of `count` images, whole numbers or names, as text.

        Raises:
            DataError: if it holds no such labels, before they are read, or the file is damaged.
        """
        if self.dtype.kind not in "iuUS" or self.shape not in ((count,), (count, 1)):
            raise DataError(
                f"{self.place}: {self.dtype} {list(self.shape)} are not the labels of {count:,} "
                "images: give one whole number or name per image"
            )
        (array,) = self.blocks(count)
        with _reading(self.place):
            if self.dtype.kind == "S":
                names = array.reshape(count).tolist()
                return [name.decode("utf-8", "surrogateescape") for name in names]
            texts = list(map(str, array.reshape(count).tolist()))
            for text in sorted(set(texts)):
                text.encode("utf-8", "surrogateescape")  # a ValueError: it is no class name
            return texts


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, whether it is in Fortran's order, and the type of a file's array."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read = np.lib.format.read_array_header_2_0
    return read(file, max_header_size=_MOST_HEADER)


@contextmanager
def _reading(place: str) -> Iterator[None]:
    """Turn the errors of a file that is damaged or cannot be read into a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # zipfile, zlib and NumPy raise many kinds for damaged files
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        reason = " ".join(str(text).split())
        raise DataError(f"{place}: cannot be read ({reason})") from error


def chosen_rows(
    array: Array, labels: NDArray[Any], rows: NDArray[np.int64], size: int | None, how: Resize
) -> Iterator[tuple[NDArray[np.uint8], NDArray[Any]]]:
    """Yield these rows of an array, which ascend, as images and labels, a few at a time."""
    first = 0
    for images in array.images():
        inside = rows[slice(*np.searchsorted(rows, (first, first + len(images))))]
        if len(inside):
            chosen = images[inside - first]
            if size is not None:
                chosen = np.stack([resize(image, size, how, array.place) for image in chosen])
            yield chosen, labels[inside]
        first += len(images)


def read_arrays(
    source: Path,
) -> tuple[dict[str, tuple[Array, NDArray[Any]]], tuple[str, ...], TargetForm | None]:
    """Return images and labels by split (`all`, or `train` and `test`), and the class names.

    Labels that are floating numbers or arrays are targets, whose form is the last value.

    `source` is an .npz file, a folder of .npy files, or one of these .npy files.

    Raises:
        DataError: if the arrays are missing or do not fit each other.
    """
    folder = source if source.is_dir() else source.parent
    if source.suffix.lower() != ".npz":
        arrays = {path.stem: Array(shown(path), path, None) for path in folder.glob("*.npy")}
    else:
        with _reading(shown(source)), zipfile.ZipFile(source) as archive:
            members = [name for name in archive.namelist() if name.endswith(".npy")]
        arrays = {
            name.removesuffix(".npy"): Array(f"{shown(source)}: {shown(name)}", source, name)
            for name in members
        }

    def pair(names: Iterable[tuple[str, str]]) -> tuple[Array, Array] | None:
        for images, labels in names:
            if images in arrays and labels in arrays:
                return arrays[images], arrays[labels]
        return None

    splits: dict[str, tuple[Array, Array]] = {}
    for split, places in (("train", ("train",)), ("test", TEST_FOLDERS)):
        names = [(i.format(place), j.format(place)) for place in places for i, j in _NAMES]
        if both := pair(names):
            splits[split] = both
    if set(splits) != set(SPLITS):
        alone = splits.get("train") or pair(_NAMES_ALONE)
        if alone is None:
            raise DataError(
                f"{shown(source)}: holds no arrays named `images` and `labels`, or "
                f"`train_images`, `train_labels`, `test_images` and `test_labels` (it holds "
                f"{', '.join(map(shown, sorted(arrays)[:10])) or 'none'})"
            )
        splits = {ALONE: alone}
    images = {name: array.with_header() for name, (array, _) in splits.items()}
    labels = {name: array.with_header() for name, (_, array) in splits.items()}
    for array in images.values():
        array.check_images()
    counts = {name: array.shape[0] for name, array in images.items()}
    if any(array.holds_targets for array in labels.values()):
        targets = {name: array.targets(counts[name]) for name, array in labels.items()}
        pairs = {name: (images[name], targets[name]) for name in splits}
        return pairs, (), _form(targets.values(), str(shown(source)))
    texts = {name: array.labels(counts[name]) for name, array in labels.items()}
    numbers, classes = labels_of(texts, {name: array.place for name, array in labels.items()})
    return {name: (images[name], numbers[name]) for name in splits}, classes, None


def _form(targets: Iterable[NDArray[Any]], place: str) -> TargetForm:
    """Return the form of all targets; raise DataError if they have several."""
    forms = {(array.shape[1:], array.dtype.name) for array in targets}
    if len(forms) > 1:
        raise DataError(
            f"{place}: its splits have targets of two types or shapes: make them equal"
        )
    ((shape, dtype),) = forms
    outputs = math.prod(shape)
    if np.dtype(dtype).kind in "iu" and min(int(array.min()) for array in targets) >= 0:
        outputs = max(int(array.max()) for array in targets) + 1  # whole numbers are classes
    return TargetForm(shape, dtype, outputs)
