"""Lists of image files: from class folders or CSV files to paths and labels in a defined order.

Images of class folders are ordered by their path inside the class folder, in natural order (`2`
before `10`), then by class. So files that are numbered through all classes keep that order.
"""

import csv
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path, PurePath

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.images import shown
from hvdtrain.data.index import IMAGE_SUFFIXES
from hvdtrain.data.order import shuffled
from hvdtrain.errors import DataError, UsageError

Labels = NDArray[np.int32]

TEST_FOLDERS = ("test", "val", "valid", "validation")
ALONE = "all"  # the split of a source without splits
MOST_CLASSES = 1_000_000

_FILE_COLUMNS = ("file", "filename", "file_name", "path", "image", "image_path", "img", "name")
_LABEL_COLUMNS = ("label", "class", "target", "category", "class_name", "y")
_PARTS = 2
_NAMED = 5  # names in a message
# The first bytes of files, and what they are. A tape archive says so at byte 257.
_KINDS = {
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"MATLAB": "a MATLAB file",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
    b"PAR1": "a Parquet file",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
    b"\x89PNG": "a single image",
    b"\xff\xd8\xff": "a single image",
}


@dataclass(frozen=True)
class Images:
    """The images of a split, in order.

    Attributes:
        paths: of the files, relative to the source.
    """

    paths: list[str]
    labels: Labels

    def take(self, rows: NDArray[np.int64]) -> "Images":
        """Return the images at these rows, in this order."""
        return Images([self.paths[row] for row in rows], self.labels[rows])


@dataclass(frozen=True)
class Listing:
    """All images of a source: the split `all`, or `train` and `test`.

    Attributes:
        notes: remarks for the user, which the index keeps.
        left_out: the number of files that are no images by their suffix, as text.
    """

    folder: Path
    splits: dict[str, Images]
    class_names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    left_out: str = ""


def kind_of(path: Path) -> str:
    """Return what a file is by its first bytes; "text" for text in ASCII or UTF-8."""
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError as error:
        raise DataError(f"{shown(path)}: cannot be read ({error.strerror})") from error
    named = (kind for first, kind in _KINDS.items() if start.startswith(first))
    other = "a file of another kind" if b"\0" in start else "text"
    return "a tape archive" if start[257:262] == b"ustar" else next(named, other)


@dataclass
class Walk:
    """A walk through the folders of a source, which refuses to read anything twice.

    Attributes:
        folders, links: the folders that were read, and the files that are symbolic links, by
            device and inode.
        others: the number of files that are no images, by suffix.
    """

    folders: dict[tuple[int, int], Path] = field(default_factory=dict)
    links: dict[tuple[int, int], Path] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)

    def enter(self, folder: Path) -> list[os.DirEntry[str]]:
        """Return the visible entries of a folder that was not read yet."""
        try:
            with os.scandir(folder) as entries:
                visible = [entry for entry in entries if not entry.name.startswith(".")]
            identity = _identity(folder.stat())
        except OSError as error:
            raise DataError(f"{shown(folder)}: cannot be read ({error.strerror})") from error
        if (first := self.folders.setdefault(identity, folder)) != folder:
            raise _read_twice(folder, first)
        return visible

    def files(self, folder: Path, name: str) -> Iterator[str]:
        """Yield the paths of the image files in a folder and in those inside it."""
        for entry in self.enter(folder):
            path = f"{name}{os.sep}{entry.name}"
            if _is_folder(entry):
                yield from self.files(folder / entry.name, path)
            elif not entry.name.lower().endswith(IMAGE_SUFFIXES):
                self.others[PurePath(entry.name).suffix.lower() or "without suffix"] += 1
            elif entry.is_symlink():
                with suppress(OSError):  # a link to nothing is a broken file
                    self.links.setdefault(_identity(entry.stat()), folder / entry.name)
                yield path
            elif entry.is_file():  # no FIFO, which would wait
                yield path

    def check(self, files: Iterable[Path]) -> None:
        """Refuse links to other ones of all the files that are read; raise DataError."""
        for file in files if self.links else ():
            with suppress(OSError):
                if (link := self.links.get(_identity(file.stat()), file)) != file:
                    raise _read_twice(link, file)

    def counts(self) -> str:
        """Return how many files are no images, by suffix; empty if there are none."""
        texts = (f"{number:,} {name}" for name, number in sorted(self.others.items()))
        return shown(", ".join(texts))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one; False for a link to itself."""
    with suppress(OSError):
        return entry.is_dir()
    return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _read_twice(one: Path, other: Path) -> DataError:
    target, link = sorted((one, other), key=lambda path: (path.is_symlink(), len(path.parts)))
    return DataError(
        f"{shown(link)}: is the same as {shown(target)}, so that its images would count twice: "
        "remove the link"
    )


def list_folder(source: Path) -> Listing:
    """List a folder of class folders, or of `train` and one of TEST_FOLDERS with class folders.

    Images are found in all folders inside a class folder. Hidden files are left out; files with
    other names than those of images are counted.

    Raises:
        DataError: for a folder without images, a class without images, splits with other
            classes, and a symbolic link to a folder above or to what is read already.
    """
    tests = [name for name in TEST_FOLDERS if (source / name).is_dir()]
    notes: list[str] = []
    if not (source / "train").is_dir():
        splits = {ALONE: source}
    elif not tests:
        splits = {ALONE: source / "train"}
    else:
        splits = {"train": source / "train", "test": source / tests[0]}
        notes += [f"{tests[0]}/ is the test split"] if tests[0] != "test" else []
        for name in tests[1:]:
            count = ""
            with suppress(DataError):  # it is not read: what is wrong with it does not matter
                count = f", with {sum(1 for _ in Walk().files(source / name, name)):,} image(s)"
            notes.append(f"{name}/ is left out{count}")
    walk = Walk()
    names = {}
    for split, folder in splits.items():
        entries = [entry.name for entry in walk.enter(folder) if _is_folder(entry)]
        names[split] = sorted(entries, key=lambda name: (natural(name), name))
        if not entries:
            raise DataError(
                f"{shown(folder)}: holds no folders of images: put the images of each class into "
                "a folder named after the class, or give a CSV file of files and labels"
            )
    classes = next(iter(names.values()))
    for one, other in permutations(names, 2):
        if extra := set(names[one]) - set(names[other]):
            raise DataError(
                f"{shown(splits[other])}: has no folder of the class(es) {some(extra)}, which "
                f"the other split has: both splits need the same classes"
            )
    images = {name: _images_of(source, folder, classes, walk) for name, folder in splits.items()}
    walk.check(source / path for split in images.values() for path in split.paths)
    return Listing(source, images, tuple(map(shown, classes)), tuple(notes), walk.counts())


def _images_of(source: Path, folder: Path, classes: Sequence[str], walk: Walk) -> Images:
    ordered: list[tuple[str, int, str]] = []
    prefix = os.path.relpath(folder, source)
    prefix = "" if prefix == os.curdir else prefix + os.sep
    for label, name in enumerate(classes):
        before = len(ordered)
        for path in walk.files(folder / name, name):
            ordered.append((natural(path[len(name) + 1 :]), label, prefix + path))
        if len(ordered) == before:
            held = f", but {walk.counts()}" if walk.others else ""
            raise DataError(
                f"{shown(folder / name)}: holds no images ({', '.join(IMAGE_SUFFIXES)}){held}: "
                "each class needs at least one in each split"
            )
    ordered.sort()
    labels = np.array([label for _, label, _ in ordered], np.int32)
    return Images([path for _, _, path in ordered], labels)


def natural(name: str) -> str:
    """Return a key that sorts names by the numbers in them: `2` before `10`."""
    return re.sub(r"0*([0-9]+)", lambda number: f"{len(number[1]):04d}{number[1]}", name)


def list_csv(source: Path) -> Listing:
    """List a CSV file of `file,label`, or a folder of `train.csv` and one of TEST_FOLDERS.

    Files are relative to the folder of the CSV file, and keep its order. Labels are class names,
    or whole numbers from 0.

    Raises:
        DataError: for a file that cannot be understood, a label out of range and a class without
            images.
    """
    if source.is_file():
        paths, notes, folder = {ALONE: source}, [], source.parent
    else:
        tests = [name for name in TEST_FOLDERS if (source / f"{name}.csv").is_file()]
        if not tests:
            return replace(list_csv(source / "train.csv"), folder=source)
        paths, folder = {"train": source / "train.csv", "test": source / f"{tests[0]}.csv"}, source
        notes = [f"{tests[0]}.csv is the test split"] if tests[0] != "test" else []
        notes += [f"{name}.csv is left out" for name in tests[1:]]
    rows = {name: list(_csv_rows(path)) for name, path in paths.items()}
    texts = {name: [label for _, label in table] for name, table in rows.items()}
    numbers, names = labels_of(texts, {name: str(path) for name, path in paths.items()})
    images = {name: Images([file for file, _ in rows[name]], numbers[name]) for name in rows}
    return Listing(folder, images, names, tuple(notes))


def _csv_rows(path: Path) -> Iterator[tuple[str, str]]:
    """Yield file and label of each row; a header is recognised by its names."""
    where = (0, 1)
    width = None
    if (kind := kind_of(path)) != "text":
        raise DataError(f"{shown(path)}: is {kind}: give a CSV file in UTF-8")
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file)
            for row in reader:
                if not any(cell.strip() for cell in row):
                    continue
                if width is None:
                    width = len(row)
                    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
                        if width == 1 and separator in row[0]:
                            raise DataError(
                                f"{shown(path)}: its columns are separated by {name}: use commas"
                            )
                    names = [cell.strip().lower() for cell in row]
                    file_columns = [i for i, name in enumerate(names) if name in _FILE_COLUMNS]
                    label_columns = [i for i, name in enumerate(names) if name in _LABEL_COLUMNS]
                    if file_columns and label_columns:
                        where = file_columns[0], label_columns[0]
                        continue
                if len(row) != width or width < _PARTS or not row[where[0]]:
                    raise DataError(
                        f"{shown(path)}: line {reader.line_num} has {len(row)} column(s): give "
                        "two, file and label, or a header that names them"
                    )
                if not (label := row[where[1]].strip()):
                    raise DataError(
                        f"{shown(path)}: line {reader.line_num} has no label: give a class name, "
                        "or a whole number from 0"
                    )
                yield row[where[0]], label
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{shown(path)}: cannot be read ({reason})") from error


def labels_of(
    texts: dict[str, list[str]], places: dict[str, str]
) -> tuple[dict[str, Labels], tuple[str, ...]]:
    """Return labels as numbers by split, and the names of the classes in natural order.

    Labels that are all whole numbers are the numbers of the classes, whose names are `class 0` and
    so on.

    Args:
        texts: the labels by split.
        places: how messages name the splits.

    Raises:
        DataError: for a label that is empty or out of range, and a split without images of a
            class.
    """
    for split, labels in texts.items():
        if not labels:
            raise DataError(f"{shown(places[split])}: holds no images")
        if unlabelled := sum(not label.strip() for label in labels):
            raise DataError(
                f"{shown(places[split])}: the label of {unlabelled:,} image(s) is empty: give a "
                "class name, or a whole number from 0"
            )
    everything = set().union(*texts.values())
    if all(re.fullmatch(r"[+-]?[0-9]{1,18}", label) for label in everything):
        numbers = {label: int(label) for label in everything}
        smallest, largest = min(numbers.values()), max(numbers.values())
        place = shown(next(iter(places.values())))
        for number in (smallest, largest):
            if not 0 <= number < MOST_CLASSES:
                raise DataError(
                    f"{place}: label {number} is out of range: give whole numbers from 0, or names"
                )
        if smallest > 0:
            raise DataError(
                f"{place}: no image has label 0, the smallest is {smallest}: labels start at 0"
            )
        names = tuple(f"class {number}" for number in range(largest + 1))
    else:
        ordered = sorted(everything, key=lambda name: (natural(name), name))
        numbers = {name: number for number, name in enumerate(ordered)}
        names = tuple(map(shown, ordered))
    result = {
        split: np.array([numbers[label] for label in labels], np.int32)
        for split, labels in texts.items()
    }
    for split, array in result.items():
        if missing := set(range(len(names))) - set(np.unique(array).tolist()):
            lacking = some(names[number] for number in missing)
            raise DataError(
                f"{shown(places[split])}: has no image of {lacking}: each class needs at least "
                "one in each split"
            )
    return result, names


def split_labels(
    labels: Labels, split: str, seed: int, class_names: Sequence[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of the test split and those of the train split, ascending.

    A part of each class is chosen at random by the seed for the test split. The parts are the
    nearest whole numbers, and at least one image each.

    Args:
        split: the value of --split.

    Raises:
        DataError: for a class with a single image.
    """
    _, fraction = parse_split(split)
    test = np.zeros(len(labels), bool)
    by_class = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[by_class], np.arange(len(class_names) + 1))
    for number, name in enumerate(class_names):
        rows = by_class[starts[number] : starts[number + 1]]
        if len(rows) < _PARTS:
            raise DataError(f"class {name} has a single image: --split needs two of each class")
        count = min(max(1, int(fraction * len(rows) + 0.5)), len(rows) - 1)
        test[shuffled(rows, f"split {seed} {number}")[:count]] = True
    return np.flatnonzero(test), np.flatnonzero(~test)


def parse_split(text: str) -> tuple[float, float]:
    """Return the fractions of train and test in the value of --split.

    Raises:
        UsageError: unless they are two positive numbers whose sum is 1.
    """
    try:
        train, test = (float(part) for part in text.split(","))
    except ValueError:
        train = test = 0.0
    if not (0 < train < 1 and 0 < test < 1 and abs(train + test - 1) < 1e-6):
        raise UsageError(
            f"--split {text}: give the parts of train and test, whose sum is 1, such as 0.9,0.1 "
            "(train --holdout makes a validation set)"
        )
    return train, test


def some(names: Iterator[str] | set[str]) -> str:
    """Return some of the names as text."""
    ordered = sorted(map(shown, names), key=natural)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(ordered[:_NAMED]) + more
