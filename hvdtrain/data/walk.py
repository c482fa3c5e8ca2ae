"""A walk through folders of images that reads nothing twice, and what other files are."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from hvdtrain.data.images import shown
from hvdtrain.data.index import IMAGE_SUFFIXES
from hvdtrain.errors import DataError

# The first bytes of files, and what they are. A tape archive says so at byte 257.
KINDS = {
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
TAR = slice(257, 262)


def kind_of(path: Path) -> str:
    """Return what a file is by its first bytes; "text" for text in ASCII or UTF-8."""
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError as error:
        raise DataError(f"{shown(path)}: cannot be read ({error.strerror})") from error
    named = (kind for first, kind in KINDS.items() if start.startswith(first))
    other = "a file of another kind" if b"\0" in start else "text"
    return "a tape archive" if start[TAR] == b"ustar" else next(named, other)


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
            if is_folder(entry):
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


def is_folder(entry: os.DirEntry[str]) -> bool:
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
