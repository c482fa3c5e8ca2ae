"""Data sets of arrays: `.npy`, `.npz` and HDF5 files, and Python iterators of samples.

A sample is an image and its label, or any array [channels, height, width] of numbers, an input,
and its target.
"""

import math
import operator
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hvdtrain.data.images import check_size, pixels, resize, rgb, shown
from hvdtrain.data.index import SPLITS, TARGET_TYPES, Index, Resize, TargetForm
from hvdtrain.data.listing import ALONE, MOST_CLASSES, TEST_FOLDERS, labels_of
from hvdtrain.data.shards import channels_last
from hvdtrain.data.writer import Layout, in_order, write_sources
from hvdtrain.errors import DataError, UsageError

# The names of the arrays of a split; `{}` is the split, and missing in a source without splits.
INPUTS = "inputs"
_NAMES = (
    ("{}_images", "{}_labels"),
    ("{}_inputs", "{}_targets"),
    ("x_{}", "y_{}"),
    ("X_{}", "y_{}"),
)
_NAMES_ALONE = (
    *(("images", "labels"), (INPUTS, "targets")),
    *(("x", "y"), ("X", "y"), ("data", "labels")),
)
_MOST_HEADER = 2**16
_BLOCK_BYTES = 2**22


def write(
    destination: Path | str,
    splits: Mapping[str, Iterable[tuple[Any, Any]]],
    class_names: Sequence[str] | None = None,
    *,
    size: int | None = None,
    resize: Resize = "shorter",
    shard_mb: int = 64,
) -> Index:
    """Pack images, or other inputs, of a Python iterator; return the index of the data set.

    An iterator is read once, from its start to its end, and holds one shard in memory at a time.

    Args:
        destination: new folder for the shards.
        splits: `train` and `test`, each an iterable of (image, label). An image is a Pillow image,
            or uint8 [height, width, 3]; grey values and an alpha channel are converted. A label is
            a whole number from 0. Or of (input, target): an input is an array [channels, height,
            width] of numbers that are not uint8, a target a label or an array.
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
    samples_of = {name: iter(splits[name]) for name in SPLITS}
    sample = next(samples_of["train"], None)
    samples_of["train"] = chain([] if sample is None else [sample], samples_of["train"])
    if sample is not None and _is_input(sample):
        if size is not None:
            raise UsageError("size is for images, and the samples are arrays of other numbers")
        return _write_inputs(destination, samples_of, sample, class_names, shard_mb)
    streams = {name: _samples(name, samples_of[name], size, resize) for name in SPLITS}
    first = next(streams["train"], None)
    shape = (1, 1, 3) if first is None else first[0].shape
    streams["train"] = chain([] if first is None else [first], streams["train"])
    sources = {name: in_order(_parts(name, streams[name], shape)) for name in SPLITS}
    return write_sources(destination, sources, Layout(shape, shard_mb=shard_mb), class_names)


def _is_input(sample: Any) -> bool:
    """Return whether a sample is an array of other numbers than pixels."""
    try:
        value, _ = sample
    except (TypeError, ValueError):
        return False
    return isinstance(value, np.ndarray) and value.dtype != np.uint8


def _write_inputs(
    destination: Path | str,
    streams: Mapping[str, Iterator[tuple[Any, Any]]],
    sample: tuple[Any, Any],
    class_names: Sequence[str] | None,
    shard_mb: int,
) -> Index:
    """Pack inputs and targets of an iterator, all of the form of the first sample."""
    first, target = (np.asarray(value) for value in sample)
    form = first.shape, first.dtype.name
    if first.dtype.name not in TARGET_TYPES or first.ndim not in (2, 3) or not first.size:
        raise DataError(f"sample 0 of `train` is {form[1]} {list(form[0])}: {INPUT_FORM}")
    forms: set[tuple[tuple[int, ...], str]] = set()

    def parts(name: str) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        inputs: list[NDArray[Any]] = []
        targets: list[NDArray[Any]] = []
        for place, (value, target) in enumerate(streams[name]):
            made, target = np.asarray(value), np.asarray(target)
            if (made.shape, made.dtype.name) != form:
                raise DataError(
                    f"sample {place} of `{name}` is {made.dtype} {list(made.shape)}, others are "
                    f"{form[1]} {list(form[0])}: give all the same form"
                )
            forms.add((target.shape, target.dtype.name))
            if len(forms) > 1 or target.dtype.name not in TARGET_TYPES:
                raise DataError(
                    f"the target of sample {place} of `{name}` is {target.dtype} "
                    f"{list(target.shape)}: give all the same form, of {', '.join(TARGET_TYPES)}"
                )
            if not (np.isfinite(made).all() and np.isfinite(target).all()):
                raise DataError(f"sample {place} of `{name}` is not finite: correct it")
            inputs.append(made)
            targets.append(target)
            if len(inputs) * made.nbytes >= _BLOCK_BYTES:
                yield channels_last(np.stack(inputs)), np.stack(targets)
                inputs, targets = [], []
        if inputs:
            yield channels_last(np.stack(inputs)), np.stack(targets)

    targets = None
    if target.shape or target.dtype.kind == "f":  # else labels of classes
        targets = TargetForm(target.shape, target.dtype.name, math.prod(target.shape))
    shape = channels_last(first[None]).shape[1:]
    layout = Layout(shape, shard_mb=shard_mb, targets=targets, image_dtype=form[1])
    sources = {name: in_order(parts(name)) for name in SPLITS}
    return write_sources(destination, sources, layout, class_names)


INPUT_FORM = f"save inputs [n, channels, height, width], of {', '.join(TARGET_TYPES)}, in C order"


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
        is_input: whether it holds inputs with channels first, of any type, rather than images.
    """

    place: str
    path: Path
    member: str | None
    shape: tuple[int, ...] = ()
    is_fortran: bool = False
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.uint8))
    is_input: bool = False

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
        """Raise DataError if images, or inputs, cannot be made of it."""
        fault = None
        if self.is_input:
            if self.dtype.name not in TARGET_TYPES or self.is_fortran or 0 in self.shape:
                fault = f"{self.dtype} {list(self.shape)}: {INPUT_FORM}"
            elif len(self.shape) not in (3, 4):
                fault = f"{list(self.shape)}: {INPUT_FORM}"
        elif self.is_fortran and len(self.shape) > 1:
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

    def images(self) -> Iterator[NDArray[Any]]:
        """Yield all images as RGB, uint8 [n, height, width, 3], a few at a time.

        Inputs are [n, height, width, channels] of their type.

        Raises:
            DataError: if the file is damaged, or an input is not finite.
        """
        row = 0
        for block in self.blocks(max(1, _BLOCK_BYTES // math.prod(self.shape[1:]))):
            if not self.is_input:
                yield np.stack([pixels(image) for image in block])
                continue
            if not np.isfinite(block).all():
                row += int(np.argwhere(~np.isfinite(block))[0][0])
                raise DataError(f"{self.place}: sample {row} is not finite: correct it")
            row += len(block)
            yield channels_last(block)

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of its samples in a data set."""
        if not self.is_input:
            return self.shape[1], self.shape[2], 3
        channels, height, width = (1, *self.shape[1:])[-3:]
        return height, width, channels

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


@dataclass(frozen=True)
class InHdf5(Array):
    """A data set of an HDF5 file; `member` is its name."""

    def with_header(self) -> Array:
        """Return the array with what the file says; raise DataError if there is none."""
        with _reading(self.place), self._file() as file:
            member = file.get(str(self.member))
            if not isinstance(member, h5py.Dataset):
                raise DataError(
                    f"{self.place}: is no data set of the file, which has {_data_sets(file)}"
                )
            is_input = member.dtype != np.uint8 or member.shape[-1] not in (1, 3, 4)
            return replace(self, shape=member.shape, dtype=member.dtype, is_input=is_input)

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        """Yield all rows in blocks of `rows`; raise DataError if the file is damaged."""
        with _reading(self.place), self._file() as file:
            for start in range(0, self.shape[0], rows):
                yield file[str(self.member)][start : start + rows]

    def _file(self) -> h5py.File:
        return h5py.File(self.path, "r", locking=False)


def _data_sets(file: h5py.File) -> str:
    """Return the names of the first data sets of a file."""
    names: list[str] = []
    file.visititems(
        lambda name, item: names.append(f"/{name}") if isinstance(item, h5py.Dataset) else None
    )
    return ", ".join(map(shown, names[:10])) or "none"


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
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
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
    source: Path, names_in_hdf5: Sequence[str] | None = None
) -> tuple[dict[str, tuple[Array, NDArray[Any]]], tuple[str, ...], TargetForm | None]:
    """Return images and labels by split (`all`, or `train` and `test`), and the class names.

    Labels that are floating numbers or arrays are targets, whose form is the last value.

    Args:
        source: an .npz file, a folder of .npy files, one of these .npy files, or an HDF5 file.
        names_in_hdf5: of the data sets in it: inputs and targets, or of both splits in turn.

    Raises:
        DataError: if the arrays are missing or do not fit each other.
    """
    if names_in_hdf5 is not None:
        return _paired(source, _in_hdf5(source, names_in_hdf5))
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
                is_input = images.endswith(INPUTS)
                return replace(arrays[images], is_input=is_input), arrays[labels]
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
    return _paired(source, splits)


def _in_hdf5(source: Path, names: Sequence[str]) -> dict[str, tuple[Array, Array]]:
    """Return the arrays of an HDF5 file by split.

    Raises:
        DataError: if there are not two or four names.
    """
    if len(names) not in (2, 4):
        raise DataError(
            f"{shown(source)}: name two data sets, as FILE.h5:/inputs,/targets, or those of train "
            "and those of test"
        )
    sets = [InHdf5(f"{shown(source)}:{shown(name)}", source, name) for name in names]
    if len(sets) == 2:
        return {ALONE: (sets[0], sets[1])}
    return {"train": (sets[0], sets[1]), "test": (sets[2], sets[3])}


def _paired(
    source: Path, splits: Mapping[str, tuple[Array, Array]]
) -> tuple[dict[str, tuple[Array, NDArray[Any]]], tuple[str, ...], TargetForm | None]:
    """Return what `read_arrays` does, of the arrays by split."""
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
