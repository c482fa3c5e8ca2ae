"""Second copies of checkpoints on disks of other hosts, and how they stand in for what is lost.

Each rank copies the part of a rank of another host to a disk of its own, and one rank a host the
records of the run. What is in DIRECTORY/RUN-.../ looks like the run folder.
"""

import hashlib
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from hvdtrain import files
from hvdtrain.errors import DataError
from hvdtrain.training.checkpoint import manifest as manifests
from hvdtrain.training.checkpoint import partfile, store
from hvdtrain.training.checkpoint.manifest import MANIFEST

SECONDS_TO_SHOW = 60.0  # in which a network file system shows what another rank has committed


def home(directory: str, run: Path, rank: int) -> Path:
    """Where a rank keeps copies of this run; `{rank}` in the directory is its number."""
    path = str(run.resolve())
    digest = hashlib.sha256(path.encode()).hexdigest()[:8]
    return Path(directory.replace("{rank}", str(rank))) / f"{run.resolve().name}-{digest}"


def neighbour(rank: int, size: int, local_size: int) -> int:
    """The rank whose part this one copies: of the next host, where there is one."""
    return (rank + (local_size if local_size < size else 1)) % size


def copy_part(checkpoint: Path, rank: int, home: Path) -> None:
    """Copy a rank's part, and the manifest, of a checkpoint that is being committed.

    Copies of checkpoints that are there no more are removed.

    Raises:
        DataError: if it cannot be copied, or differs from its hash.
    """
    until = time.monotonic() + SECONDS_TO_SHOW
    while not (checkpoint / MANIFEST).exists() and time.monotonic() < until:
        time.sleep(0.05)
    name = manifests.part_name(rank)
    entry = next(part for part in manifests.read(checkpoint).parts if part.name == name)
    try:
        (home / checkpoint.name).mkdir(parents=True, exist_ok=True)
        for file in (name, MANIFEST):  # what has a manifest has its part
            _copy(checkpoint / file, home / checkpoint.name / file)
    except OSError as error:
        raise DataError(f"{home / checkpoint.name} cannot be written: {error.strerror}") from None
    partfile.verify(home / checkpoint.name, entry)
    kept = {path.name for path in store.stored(checkpoint.parent)} | {checkpoint.name}
    for path in store.stored(home):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def copy_record(record: Path, size: int, home: Path) -> None:
    """Let the copy of a file that only grows have its first `size` bytes.

    Raises:
        DataError: if it cannot be copied.
    """
    try:
        with record.open("rb") as source, (home / record.name).open("ab") as copy:
            copy.truncate(min(copy.tell(), size))
            copy.seek(0, os.SEEK_END)
            source.seek(copy.tell())
            copy.write(source.read(size - copy.tell()))
            copy.flush()
            os.fsync(copy.fileno())
    except OSError as error:
        raise DataError(f"{home / record.name} cannot be written: {error.strerror}") from None


def mend(checkpoint: Path, home: Path) -> None:
    """Give back what is copied here, where the checkpoint lacks it or holds something else.

    Raises:
        DataError: if it cannot be written.
    """
    held = home / checkpoint.name
    try:
        parts = manifests.read(held).parts
    except DataError:
        return  # none here, or itself damaged
    try:
        checkpoint.mkdir(parents=True, exist_ok=True)
        for entry in parts:
            if _is_good(held, entry) and not _is_good(checkpoint, entry):
                _copy(held / entry.name, checkpoint / entry.name)
        try:
            manifests.read(checkpoint)
        except DataError:
            _copy(held / MANIFEST, checkpoint / MANIFEST)
    except OSError as error:
        raise DataError(f"{checkpoint} cannot be mended: {error.strerror}") from None


def mend_records(run: Path, home: Path) -> None:
    """Give back configuration and metrics where the run folder has none.

    Raises:
        DataError: if they cannot be written.
    """
    for copy in home.glob("*.*"):
        if (
            copy.is_file()
            and copy.suffix in (".yaml", ".jsonl")
            and not (run / copy.name).exists()
        ):
            try:
                run.mkdir(parents=True, exist_ok=True)
                _copy(copy, run / copy.name)
            except OSError as error:
                raise DataError(f"{run} cannot be written: {error.strerror}") from None


def names(home: Path) -> list[str]:
    """The checkpoints of which there is a copy here."""
    return [path.name for path in store.stored(home)]


def _is_good(folder: Path, entry: partfile.Entry) -> bool:
    with suppress(DataError):
        partfile.verify(folder, entry)
        return True
    return False


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as file:
        files.write_whole(target, lambda out: shutil.copyfileobj(file, out, 2**22))
