"""`--replicate`: second copies of checkpoints on the disks of other hosts, and repairs from them.

Each rank copies the checkpoint file of a rank on another host to its own disk. One rank per host
also copies the records of the run. DIRECTORY/RUN-.../ is laid out like the run folder.
"""

import hashlib
import os
import shutil
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.checkpoint import store
from hvdtrain.checkpoint.format import MANIFEST, Entry, Manifest, part_name, read_manifest
from hvdtrain.checkpoint.tensorfile import verify
from hvdtrain.config import TrainConfig
from hvdtrain.engine.folders import RunFolder
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files
from hvdtrain.world import World

SECONDS_TO_SHOW = 60.0  # until a network file system shows what another rank has committed

Identity = tuple[int, int]  # inode, and time of the last change


@dataclass
class Replication:
    """The second copies that this rank keeps.

    Attributes:
        home: the folder of this rank's copies.
        owner: the rank whose checkpoint files are copied.
        is_new: whether no copy was made since the run was opened.
        before: the identity of the checkpoint that the pending one will replace.
    """

    world: World
    folder: RunFolder
    home: Path
    owner: int
    is_new: bool = True
    before: Identity | None = None

    def expect(self, name: str) -> None:
        """Note that the checkpoint `name` is about to be written."""
        self.before = identity(self.folder.checkpoints.resolve() / name)

    def keep(self, name: str) -> None:
        """Copy the owner's file of that checkpoint once it is committed.

        One rank per host also copies the records of the run.
        """
        checkpoint = self.folder.checkpoints.resolve() / name
        try:
            written = wait_for(checkpoint, self.before).progress["metrics_bytes"]
            if self.world.local_rank == 0:  # records first: the checkpoint refers to them
                config = self.folder.config
                copy_record(config, config.stat().st_size, self.home, is_new=True)
                copy_record(self.folder.metrics, written, self.home, self.is_new)
            copy_part(checkpoint, self.owner, self.home)
            self.is_new = False
        except (DataError, OSError) as error:  # the run continues: the checkpoint itself is saved
            where = f"rank {self.world.rank} on {socket.gethostname()}"
            print(f"hvdtrain: {where} has no second copy of {name}: {error}", file=sys.stderr)


def repair_records(config: TrainConfig, world: World) -> None:
    """Restore records that the run folder lost, from the rank that has most. Collective.

    Raises:
        DataError: if they cannot be written.
        UsageError: if another user could have changed the copies.
    """
    if not (config.replicate and config.resume and config.run):
        return
    run = Path(config.run)
    home = home_of(config.replicate, run, world.rank)
    fault = files.ownership_problem(home, follow=False) if home.exists() else None
    if fault := next(filter(None, world.gather(fault)), None):
        raise UsageError(f"--replicate: {fault}")
    # The largest copy is of the newest checkpoint.
    sizes = world.gather(sum(path.stat().st_size for path in records(home)))
    for copy in records(home) if world.rank == int(np.argmax(sizes)) else ():
        if not (run / copy.name).exists():
            try:
                run.mkdir(files.OWN_FOLDER, parents=True, exist_ok=True)
                _copy(copy, run / copy.name)
            except OSError as error:
                raise DataError(f"{run} cannot be written: {error.strerror}") from None
    world.barrier()


def refuse_to_start_over(config: TrainConfig, folder: RunFolder, world: World) -> None:
    """Refuse a new start that would remove the copies of a run whose folder is lost. Collective.

    Raises:
        UsageError: if a rank's folder of --replicate holds checkpoints.
    """
    home = home_of(config.replicate, folder.path, world.rank) if config.replicate else None
    held = world.gather(str(home) if home is not None and home.is_dir() and copied(home) else "")
    if left := next(filter(None, held), None):
        raise UsageError(
            f"--resume auto: {left} holds copies of checkpoints of a run whose config.yaml is "
            f"missing: restore {folder.config}, or remove the copies to start a new run"
        )


def open_replication(
    config: TrainConfig, folder: RunFolder, world: World, say: Callable[[str], None]
) -> Replication | None:
    """Return the replication that `--replicate` requests, and make its folder. Collective.

    Args:
        say: prints a line.

    Raises:
        UsageError: if the folder cannot be made, or another user could change it.
    """
    if not config.replicate:
        return None
    home = home_of(config.replicate, folder.path, world.rank)
    try:
        files.make_own_folder(home, "--replicate")
        if not config.resume:
            clear(home)
    except OSError as error:
        raise UsageError(f"--replicate: {home} cannot be made: {error.strerror}") from None
    hosts = world.gather(socket.gethostname())
    owners = owners_of(hosts)
    if any(hosts[rank] == hosts[owner] for rank, owner in enumerate(owners)):
        say("note: --replicate keeps some copies on the same host as the original")
    return Replication(world, folder, home, owners[world.rank])


def home_of(directory: str, run: Path, rank: int) -> Path:
    """Return a rank's folder for copies of this run; `{rank}` in `directory` is its number."""
    path = str(run.resolve())
    digest = hashlib.sha256(path.encode()).hexdigest()[:8]
    return Path(directory.replace("{rank}", str(rank))) / f"{run.resolve().name}-{digest}"


def owners_of(hosts: Sequence[str]) -> list[int]:
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


def wait_for(checkpoint: Path, before: Identity | None) -> Manifest:
    """Wait for a checkpoint that replaces the one `before`, and return its manifest.

    Raises:
        DataError: if it does not appear in time.
    """
    until = time.monotonic() + SECONDS_TO_SHOW
    while identity(checkpoint) in (None, before) and time.monotonic() < until:
        time.sleep(0.05)
    return read_manifest(checkpoint)


def copy_part(checkpoint: Path, rank: int, home: Path) -> None:
    """Copy a rank's file of a checkpoint, if it wrote one, and the manifest.

    Copies of checkpoints that no longer exist are removed.

    Raises:
        DataError: if the file cannot be copied, or differs from its hash.
    """
    name = part_name(rank)
    entries = [part for part in read_manifest(checkpoint).parts if part.name == name]
    try:
        (home / checkpoint.name).mkdir(parents=True, exist_ok=True)
        # The manifest last: a copy that has one is complete.
        for file in (*(entry.name for entry in entries), MANIFEST):
            _copy(checkpoint / file, home / checkpoint.name / file)
    except OSError as error:
        raise DataError(f"{home / checkpoint.name} cannot be written: {error.strerror}") from None
    for entry in entries:
        verify(home / checkpoint.name, entry)
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
        files.sync(copy)
    except OSError as error:
        raise DataError(f"{copy} cannot be written: {error.strerror}") from None


def records(home: Path) -> list[Path]:
    """Return the copies of the run's records."""
    return [path for path in home.glob("*.*") if path.suffix in (".yaml", ".jsonl")]


def repair(checkpoint: Path, home: Path) -> None:
    """Repair missing and damaged files of a checkpoint from the copies in `home`.

    Raises:
        DataError: if a file cannot be written.
    """
    copy = home / checkpoint.name
    try:
        parts = read_manifest(copy).parts
    except DataError:
        return  # there is no copy, or it is damaged
    try:
        checkpoint.mkdir(parents=True, exist_ok=True)
        for entry in parts:
            if _is_good(copy, entry) and not _is_good(checkpoint, entry):
                _copy(copy / entry.name, checkpoint / entry.name)
        try:
            read_manifest(checkpoint)
        except DataError:
            _copy(copy / MANIFEST, checkpoint / MANIFEST)
    except OSError as error:
        raise DataError(f"{checkpoint} cannot be repaired: {error.strerror}") from None


def copied(home: Path) -> list[str]:
    """Return the names of the checkpoints that have copies in `home`."""
    return [path.name for path in store.stored(home)]


def _is_good(folder: Path, entry: Entry) -> bool:
    with suppress(DataError):
        verify(folder, entry)
        return True
    return False


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        files.write_whole(target, lambda out: shutil.copyfileobj(file, out, 2**22), mode)
