"""Second copies of checkpoints on disks of other hosts, and how they stand in for what is lost.

Each rank copies the part of a rank of another host to a disk of its own, and one rank a host the
records of the run. What is in DIRECTORY/RUN-.../ looks like the run folder.
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

from hvdtrain import files
from hvdtrain.errors import DataError
from hvdtrain.training.checkpoint import manifest as manifests
from hvdtrain.training.checkpoint import partfile, store
from hvdtrain.training.checkpoint.manifest import MANIFEST

SECONDS_TO_SHOW = 60.0  # in which a network file system shows what another rank has committed

Identity = tuple[int, int]  # inode, and time of the last change


def home(directory: str, run: Path, rank: int) -> Path:
    """Where a rank keeps copies of this run; `{rank}` in the directory is its number."""
    path = str(run.resolve())
    digest = hashlib.sha256(path.encode()).hexdigest()[:8]
    return Path(directory.replace("{rank}", str(rank))) / f"{run.resolve().name}-{digest}"


def owners(hosts: Sequence[str]) -> list[int]:
    """For each rank the one whose part it copies: of another host, if there is one.

    Args:
        hosts: of each rank.

    Each part has one copy. Only where a host has more than half of all ranks some of its parts
    are copied by itself.
    """
    by_host = sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))
    most = max(Counter(hosts).values())
    shift = most if most < len(hosts) else 1
    found = {rank: by_host[(i + shift) % len(hosts)] for i, rank in enumerate(by_host)}
    return [found[rank] for rank in range(len(hosts))]


def clear(home: Path) -> None:
    """Forget another run of this name: what is copied from now on is of a new one."""
    for path in (*store.stored(home), *records(home)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def identity(checkpoint: Path) -> Identity | None:
    """Tells a checkpoint from another one of its name; None where there is none."""
    try:
        status = (checkpoint / MANIFEST).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def wait_for(checkpoint: Path, before: Identity | None) -> manifests.Manifest:
    """The manifest of a checkpoint that is being committed in place of the one `before`.

    Raises:
        DataError: if it is not there in time.
    """
    until = time.monotonic() + SECONDS_TO_SHOW
    while identity(checkpoint) in (None, before) and time.monotonic() < until:
        time.sleep(0.05)
    return manifests.read(checkpoint)


def copy_part(checkpoint: Path, rank: int, home: Path) -> None:
    """Copy a rank's part of a checkpoint, and the manifest.

    Copies of checkpoints that are there no more are removed.

    Raises:
        DataError: if it cannot be copied, or differs from its hash.
    """
    name = manifests.part_name(rank)
    found = [part for part in manifests.read(checkpoint).parts if part.name == name]
    if not found:
        raise DataError(f"{checkpoint} has no {name}")
    try:
        (home / checkpoint.name).mkdir(parents=True, exist_ok=True)
        for file in (name, MANIFEST):  # what has a manifest has its part
            _copy(checkpoint / file, home / checkpoint.name / file)
    except OSError as error:
        raise DataError(f"{home / checkpoint.name} cannot be written: {error.strerror}") from None
    partfile.verify(home / checkpoint.name, found[0])
    kept = {path.name for path in store.stored(checkpoint.parent)} | {checkpoint.name}
    for path in store.stored(home):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def copy_record(record: Path, size: int, home: Path, is_new: bool) -> None:
    """Let the copy of a file have its first `size` bytes.

    Args:
        is_new: whether the copy may be of something else; otherwise the file has only grown.

    Raises:
        DataError: if it cannot be copied.
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
    """The copies of the run's records."""
    return [path for path in home.glob("*.*") if path.suffix in (".yaml", ".jsonl")]


def records_bytes(home: Path) -> int:
    """How much of the records there is here; the largest has seen the newest checkpoint."""
    return sum(path.stat().st_size for path in records(home))


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
    for copy in records(home):
        if not (run / copy.name).exists():
            try:
                run.mkdir(files.OWN_FOLDER, parents=True, exist_ok=True)
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
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        files.write_whole(target, lambda out: shutil.copyfileobj(file, out, 2**22), mode)
