"""The temporary folder of a data set that is being written, and what a killed process left in it.

The folder is locked while a process writes into it, so that a second one is refused, and what a
dead one left is used or removed.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.index import INDEX_FILE, Index, Shard
from hvdtrain.errors import DataError

PARTIAL_FOLDER = ".partial"
JOURNAL = "journal.json"
LOCK = "lock"


class Resumable(DataError):
    """A fault of the machine, not of the source: what is written so far is kept to resume."""


@dataclass
class Done:
    """The finished shards of a split.

    Attributes:
        next: place in the source of the first sample that no shard holds.
        broken: place and description of each sample before it that was left out.
    """

    shards: list[Shard] = field(default_factory=list)
    next: int = 0
    broken: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class Journal:
    """The shards that a temporary folder holds, and what is known of them.

    Attributes:
        key: identity of the sources and options; None if nobody can resume.
        histogram: how many pixels of the train split have each value, [channels][256].
    """

    folder: Path
    key: str | None
    splits: dict[str, Done] = field(default_factory=dict)
    histogram: list[list[int]] = field(default_factory=list)
    largest_label: int = -1

    def save(self) -> None:
        """Write the journal, if somebody can resume."""
        if self.key is not None:
            content = {name: value for name, value in asdict(self).items() if name != "folder"}
            write_file(self.folder / f"{JOURNAL}.new", json.dumps(content).encode())
            (self.folder / f"{JOURNAL}.new").replace(self.folder / JOURNAL)

    def counts(self, channels: int) -> NDArray[np.int64]:
        """Return the histogram as an array: int64 [channels, 256]."""
        return np.array(self.histogram or np.zeros((channels, 256)), np.int64)

    def add_counts(self, counts: NDArray[np.int64]) -> None:
        """Add the pixels of a shard to the histogram."""
        self.histogram = (self.counts(len(counts)) + counts).tolist()


@contextmanager
def partial_folder(destination: Path, key: str | None) -> Iterator[Journal]:
    """Yield the journal of a temporary folder inside the destination, and remove it at the end.

    An interrupt (Ctrl-C) and a Resumable error leave the folder, if there is a key to resume with.

    Raises:
        DataError: if the destination holds a data set, cannot be written, or another process
            writes into it.
    """
    if os.path.lexists(destination / INDEX_FILE):
        raise DataError(
            f"{destination}: holds a data set already; remove it or choose another folder"
        )
    missing = [path for path in (destination, *destination.parents) if not path.exists()]
    partial = destination / PARTIAL_FOLDER
    lock = None
    try:
        destination.mkdir(parents=True, exist_ok=True)
        lock = _locked(partial)
        journal = _left_behind(partial, destination, key)
    except FileExistsError as error:
        raise DataError(f"{destination}: is not a folder; choose another") from error
    except OSError as error:
        _remove_empty(missing)
        raise cannot_write(destination, error) from error
    try:
        yield journal
    except BaseException as error:
        if key is None or not isinstance(error, KeyboardInterrupt | Resumable):
            shutil.rmtree(partial, ignore_errors=True)
            _remove_empty(missing)
        raise
    else:
        shutil.rmtree(partial, ignore_errors=True)
    finally:
        if lock is not None:
            os.close(lock)


def _locked(partial: Path) -> int | None:
    """Create the temporary folder and its lock, and lock it; return None without locks on disk."""
    is_new = not os.path.lexists(partial)
    refusal = (
        f"{partial}: another process is packing into this folder, or was killed while it did; "
        "if none is running, remove the folder and try again"
    )
    if is_new:
        partial.mkdir()
    elif not (partial / LOCK).is_file():
        raise DataError(refusal)
    lock = os.open(partial / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno == errno.EWOULDBLOCK or not is_new:
            raise DataError(refusal) from None
        return None
    return lock


def _left_behind(partial: Path, destination: Path, key: str | None) -> Journal:
    """Return the journal of a killed process with this key, or an empty one in an empty folder."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        content = json.loads((partial / JOURNAL).read_text())
        if key is not None and content["key"] == key:
            splits = {name: _done(done) for name, done in content.pop("splits").items()}
            journal = Journal(folder=partial, splits=splits, **content)
            if all(_is_whole(partial, destination, s) for d in splits.values() for s in d.shards):
                return journal
    for path in partial.iterdir():
        if path.name != LOCK:
            path.unlink()
    return Journal(partial, key)


def _done(content: dict[str, Any]) -> Done:
    shards = [Shard(**shard) for shard in content["shards"]]
    return Done(shards, content["next"], [(place, text) for place, text in content["broken"]])


def _is_whole(partial: Path, destination: Path, shard: Shard) -> bool:
    """Return whether a finished shard is intact; take it back if it was published already."""
    path = partial / shard.file
    if not path.exists() and (destination / shard.file).exists():
        (destination / shard.file).rename(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256


def _remove_empty(folders: list[Path]) -> None:
    """Remove these folders, innermost first, as long as they exist and are empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Write and flush a file of the temporary folder; raise DataError if that fails."""
    try:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # The message names the final path, which the user knows, not the temporary one.
        raise cannot_write(path.parent.parent / path.name, error) from error


def publish(partial: Path, destination: Path, index: Index) -> None:
    """Write the index, and rename all files into the destination, the index last.

    Raises:
        DataError: if that fails: then none of them is left in the destination.
    """
    text = json.dumps(index.to_json(), indent=1) + "\n"
    write_file(partial / INDEX_FILE, text.encode())
    files = [shard.file for split in index.splits.values() for shard in split.shards]
    _rename(partial, destination, [*files, INDEX_FILE])


def _rename(partial: Path, destination: Path, files: list[str]) -> None:
    """Rename the files into the destination, in this order, and flush the folder to the disk."""
    moved: list[Path] = []
    try:
        for name in files:
            (partial / name).rename(destination / name)
            moved.append(destination / name)
        descriptor = os.open(destination, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException as error:
        for path in reversed(moved):
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(destination, error) from error
        raise


def cannot_write(path: Path, error: OSError) -> DataError:
    """Return the error for a file or folder that cannot be written."""
    fixes = {
        errno.ENOSPC: "free some space or choose another folder",
        errno.EDQUOT: "free some of your quota or choose another folder",
        errno.EFBIG: "raise the limit or choose smaller shards (--shard-mb)",
    }
    fix = fixes.get(error.errno or 0, "choose another folder")
    return DataError(f"{path}: cannot be written ({error.strerror}); {fix}")
