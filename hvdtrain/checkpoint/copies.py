"""Second copies of checkpoints on the disks of other hosts, and repairs from them.

Each rank copies the checkpoint file of a rank on another host to its own disk. One rank per host
also copies the records of the run. DIRECTORY/RUN-.../ is laid out like the run folder.
"""

import hashlib
import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hvdtrain.checkpoint import manifest as manifests
from hvdtrain.checkpoint import partfile, store
from hvdtrain.checkpoint.manifest import MANIFEST
from hvdtrain.errors import DataError
from hvdtrain.host import files

SECONDS_TO_SHOW = 60.0  # until a network file system shows what another rank has committed

Identity = tuple[int, int]  # inode, and time of the last change


def home(directory: str, run: Path, rank: int) -> Path:
    """Return a rank's folder for copies of this run; `{rank}` in `directory` is its number."""
    path = str(run.resolve())
    digest = hashlib.sha256(path.encode()).hexdigest()[:8]
    return Path(directory.replace("{rank}", str(rank))) / f"{run.resolve().name}-{digest}"


def owners(hosts: Sequence[str]) -> list[int]:
    """Return for each rank the rank whose file it copies: on another host, if there is one.

    Each file has one copy. Only if a host has more than half of all ranks, it copies some of its
    own files.

    Args:
        hosts: of each rank.
    """
    by_host = sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))
    largest = max(Counter(hosts).values())
    shift = largest if largest < len(hosts) else 1
    owner_of = {rank: by_host[(i + shift) % len(hosts)] for i, rank in enumerate(by_host)}
    return [owner_of[rank] for rank in range(len(hosts))]


def clear(home: Path) -> None:
    """Remove the copies of an earlier run of the same name."""
    for path in (*store.stored(home), *records(home)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def identity(checkpoint: Path) -> Identity | None:
    """Return what distinguishes a checkpoint from others of its name; None if there is none."""
    try:
        status = (checkpoint / MANIFEST).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def wait_for(checkpoint: Path, before: Identity | None) -> manifests.Manifest:
    """Wait for a checkpoint that replaces the one `before`, and return its manifest.

    Raises:
        DataError: if it does not appear in time.
    """
    until = time.monotonic() + SECONDS_TO_SHOW
    while identity(checkpoint) in (None, before) and time.monotonic() < until:
        time.sleep(0.05)
    return manifests.read(checkpoint)


def copy_part(checkpoint: Path, rank: int, home: Path) -> None:
    """Copy a rank's file of a checkpoint, and the manifest.

    Copies of checkpoints that no longer exist are removed.

    Raises:
        DataError: if the file cannot be copied, or differs from its hash.
    """
    name = manifests.part_name(rank)
    entries = [part for part in manifests.read(checkpoint).parts if part.name == name]
    if not entries:
        raise DataError(f"{checkpoint} has no {name}")
    try:
        (home / checkpoint.name).mkdir(parents=True, exist_ok=True)
        for file in (name, MANIFEST):  # the manifest last: a copy that has one is complete
            _copy(checkpoint / file, home / checkpoint.name / file)
    except OSError as error:
        raise DataError(f"{home / checkpoint.name} cannot be written: {error.strerror}") from None
    partfile.verify(home / checkpoint.name, entries[0])
    kept = {path.name for path in store.stored(checkpoint.parent)} | {checkpoint.name}
    for path in store.stored(home):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def copy_record(record: Path, size: int, home: Path, is_new: bool) -> None:
    """Copy the first `size` bytes of a file.

    Args:
        is_new: whether to copy all of them; otherwise the file has only grown since the last copy.

    Raises:
        DataError: if the file cannot be copied.
    """
    copy = home / record.name
    try:
        if is_new or not copy.exists():
            with record.open("rb") as source:
                mode = stat.S_IMODE(os.fstat(source.fileno()).st_mode)
                files.write_whole(copy, lambda out: out.write(source.read(size)), mode)
            return
        with record.open("rb") as source, copy.open("ab") as out:
            out.truncate(min(out.tell(), size))
            out.seek(0, os.SEEK_END)
            source.seek(out.tell())
            out.write(source.read(size - out.tell()))
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise DataError(f"{copy} cannot be written: {error.strerror}") from None


def records(home: Path) -> list[Path]:
    """Return the copies of the run's records."""
    return [path for path in home.glob("*.*") if path.suffix in (".yaml", ".jsonl")]


def records_bytes(home: Path) -> int:
    """Return the bytes of the copied records: the largest copy is of the newest checkpoint."""
    return sum(path.stat().st_size for path in records(home))


def repair(checkpoint: Path, home: Path) -> None:
    """Repair missing and damaged files of a checkpoint from the copies in `home`.

    Raises:
        DataError: if a file cannot be written.
    """
    copy = home / checkpoint.name
    try:
        parts = manifests.read(copy).parts
    except DataError:
        return  # there is no copy, or it is damaged
    try:
        checkpoint.mkdir(parents=True, exist_ok=True)
        for entry in parts:
            if _is_good(copy, entry) and not _is_good(checkpoint, entry):
                _copy(copy / entry.name, checkpoint / entry.name)
        try:
            manifests.read(checkpoint)
        except DataError:
            _copy(copy / MANIFEST, checkpoint / MANIFEST)
    except OSError as error:
        raise DataError(f"{checkpoint} cannot be repaired: {error.strerror}") from None


def repair_records(run: Path, home: Path) -> None:
    """Restore config.yaml and metrics.jsonl if the run folder has none.

    Raises:
        DataError: if they cannot be written.
    """
    for copy in records(home):
        if not (run / copy.name).exists():
            try:
                run.mkdir(files.OWN_FOLDER, parents=True, exist_ok=True)
                _copy(copy, run / copy.name)
            except OSError as error:
                raise DataError(f"{run} cannot be written: {error.strerror}") from None


def names(home: Path) -> list[str]:
    """Return the names of the checkpoints that have copies in `home`."""
    return [path.name for path in store.stored(home)]


def _is_good(folder: Path, entry: partfile.Entry) -> bool:
    with suppress(DataError):
        partfile.verify(folder, entry)
        return True
    return False


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        files.write_whole(target, lambda out: shutil.copyfileobj(file, out, 2**22), mode)
