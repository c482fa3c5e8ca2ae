"""Resuming from a checkpoint under the plan of now, and second copies to resume from.

With `--replicate` each rank copies the checkpoint file of a rank on another host to its own disk.
One rank per host also copies the records of the run. DIRECTORY/RUN-.../ is laid out like the run
folder.
"""

import hashlib
import os
import shutil
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hvdtrain import configfile
from hvdtrain.checkpoint import store
from hvdtrain.checkpoint.store import MODEL, SYNC
from hvdtrain.checkpoint.tensorfile import (
    MANIFEST,
    PAUSES,
    Damaged,
    Entry,
    Manifest,
    Unreadable,
    part_name,
    patiently,
    read_manifest,
    read_verified,
    verify,
)
from hvdtrain.config import TrainConfig
from hvdtrain.engine.folders import RunFolder
from hvdtrain.engine.progress import Progress
from hvdtrain.engine.session import Session, Shape
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files
from hvdtrain.host.activity import START_FACTOR
from hvdtrain.transfer import broadcast_memory
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


Value = TypeVar("Value")
Forms = dict[str, tuple[Shape, np.dtype[Any]]]  # of tensors, by name

FOLDER_SECONDS = 30.0  # until a network file system shows a folder to other hosts


@dataclass(frozen=True)
class _Verified:
    """A checkpoint whose files match its manifest.

    Attributes:
        entries: the files; file n was read by rank n modulo the number of ranks.
        parts: the tensors of each file.
        read: the tensors of the files that this rank has read, by name.
    """

    path: Path
    progress: dict[str, Any]
    configuration: dict[str, Any]
    entries: tuple[Entry, ...]
    parts: list[Forms]
    read: dict[str, np.ndarray]

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of each tensor."""
        return {name: shape for forms in self.parts for name, (shape, _) in forms.items()}


def restore(session: Session, run: RunFolder, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Load the newest checkpoint that verifies into model and optimizer; return its progress.

    Collective. Returns None if the folder holds no checkpoint. Damaged checkpoints are renamed.
    One that cannot be read at the moment is not renamed, and ends the search.

    Raises:
        UsageError: if the checkpoint is of another data set, configuration or model.
        DataError: if no checkpoint verifies, or the newest one cannot be read.
    """
    with session.activity.doing("reading a checkpoint", START_FACTOR):
        return _newest_put(session, run, say)


def _newest_put(
    session: Session, run: RunFolder, say: Callable[[str], None]
) -> dict[str, Any] | None:
    world, folder = session.world, run.checkpoints.resolve()
    directory = session.config.replicate
    home = home_of(directory, run.path, world.rank) if directory else None
    local = [path.name for path in store.stored(folder)] + (copied(home) if home else [])
    names = {name for rank_names in _gather(session, local) for name in rank_names}
    faulty: list[tuple[Path, DataError]] = []
    for name in sorted(names, key=store.step_of, reverse=True):
        path = folder / name  # it exists at least in part
        outcome = fault = _verify(path, session)
        if isinstance(fault, DataError) and home is not None:
            unrepaired = None
            try:
                repair(path, home)
            except DataError as error:
                unrepaired = error
            outcome = _worst(_gather(session, unrepaired)) or _verify(path, session)
            if isinstance(outcome, _Verified):
                say(f"repaired {path.name} from the copies of --replicate: {fault}")
        if isinstance(outcome, Unreadable):
            raise DataError(
                f"{outcome}, {len(PAUSES) + 1} times in a row; nothing was changed: check the "
                "disk, then start the run again"
            )
        if isinstance(outcome, DataError):
            faulty.append((path, outcome))
            continue
        _put(session, outcome)
        for other, why in faulty:
            say(f"skipped checkpoint {_set_aside(other, why, world)}: {why}")
        return outcome.progress
    if faulty:
        raise DataError(f"{folder} holds no checkpoint that verifies: {faulty[0][1]}")
    return None


def _set_aside(path: Path, fault: DataError, world: World) -> str:
    """Rename a checkpoint if it is damaged; return its name, and its new name, for a message."""
    if not isinstance(fault, Damaged):
        return path.name
    exists = world.rank == 0 and path.exists()
    return f"{path.name}, renamed to {store.set_aside(path).name}" if exists else path.name


def _waiting(session: Session) -> AbstractContextManager[None]:
    """Return the activity of waiting until all ranks have read their files."""
    line = "waiting for all ranks to read a checkpoint"
    return session.activity.doing(line, START_FACTOR, after_others=True)


def _gather(session: Session, value: Value) -> list[Value]:
    with _waiting(session):
        return session.world.gather(value)


def _verify(path: Path, session: Session) -> _Verified | DataError:
    """Return a checkpoint's content, or what is wrong with it: the same on all ranks.

    Each rank reads its share of the files, whichever rank wrote them.
    """
    world = session.world
    manifest = _manifest(path) if world.rank == 0 else None
    with _waiting(session):
        manifest = world.broadcast(manifest)
    if isinstance(manifest, DataError):
        return manifest
    fault, read = None, list[dict[str, np.ndarray]]()
    try:
        until = time.monotonic() + FOLDER_SECONDS
        while not path.is_dir():  # until this host sees the checkpoint, as rank 0 does
            if time.monotonic() > until:
                raise Unreadable(f"{path} does not exist on {socket.gethostname()}")
            time.sleep(0.1)
        for entry in manifest.parts[world.rank :: world.size]:
            with session.activity.doing("reading a checkpoint", START_FACTOR):
                read.append(patiently(partial(read_verified, path, entry)))
    except DataError as error:
        # Its frames hold what was read, and it lives until another checkpoint is found.
        fault = error.with_traceback(None)
        read.clear()
    forms = [
        {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for tensors in read
    ]
    results = _gather(session, (fault, forms))
    if worst := _worst([rank_fault for rank_fault, _ in results]):
        read.clear()
        return worst
    count = len(manifest.parts)
    parts = [results[part % world.size][1][part // world.size] for part in range(count)]
    if len({name for part in parts for name in part}) != sum(map(len, parts)):
        return Damaged(f"{path} contains a tensor twice")
    held = {name: tensor for tensors in read for name, tensor in tensors.items()}
    return _Verified(path, manifest.progress, manifest.configuration, manifest.parts, parts, held)


def _worst(faults: Sequence[DataError | None]) -> DataError | None:
    """Return the fault that counts: an unreadable file first, so that no rank renames it."""

    def order(fault: DataError) -> int:
        return 0 if isinstance(fault, Unreadable) else 2 if isinstance(fault, Damaged) else 1

    return min((fault for fault in faults if fault is not None), key=order, default=None)


def _manifest(path: Path) -> Manifest | DataError:
    try:
        manifest = patiently(partial(read_manifest, path))
    except DataError as error:
        return error
    try:
        Progress.of(manifest.progress)
    except DataError as error:
        return Damaged(f"{path} {error}")
    return manifest


def _put(session: Session, checkpoint: _Verified) -> None:
    """Load the tensors that this rank holds. Collective.

    Raises:
        UsageError: if the checkpoint is of another data set, configuration or model.
        DataError: if a tensor is missing, or has another shape.
    """
    config, trained_on = session.config, checkpoint.progress["index_hash"]
    if trained_on != session.index.hash:
        raise UsageError(
            f"{config.data} (index {session.index.hash[:8]}) is not the data set that this run "
            f"was trained on (index {trained_on[:8]}): use that one as --data"
        )
    # The options match config.yaml, but somebody may have replaced that file.
    if changed := configfile.differences(checkpoint.configuration, config):
        raise UsageError(
            f"{checkpoint.path} was made with another configuration than config.yaml has now "
            f"({'; '.join(changed)}): restore config.yaml, or choose another --run"
        )
    shapes = checkpoint.shapes
    model = {
        name.removeprefix(MODEL): shape for name, shape in shapes.items() if name.startswith(MODEL)
    }
    if difference := _difference(model, session.state.shapes):
        raise UsageError(
            f"{checkpoint.path} holds the parameters of another model than --model "
            f"{config.model}: {difference}: use the model code that the run was started with, "
            "or another --run"
        )
    progress = checkpoint.progress
    was_updated = progress["step"] > progress.get("skipped_steps", 0)
    expected = session.state.expected(was_updated, shapes)
    for name, shape in expected.items():
        if shapes.get(name) != shape:
            raise DataError(f"{checkpoint.path} contains no {name} of shape {shape}")
    session.state.put(_spread(checkpoint, expected.keys(), session))


def _spread(
    checkpoint: _Verified, names: Collection[str], session: Session
) -> dict[str, np.ndarray]:
    """Return the tensors of these names, each read by one rank and sent to all. Collective.

    So a job of any size opens each file once. A rank drops at once what it does not need. The
    states of ways to agree are of one rank each, which reads its own unless it has done so.
    """
    rank, size, held = session.world.rank, session.world.size, dict[str, np.ndarray]()
    for part, forms in enumerate(checkpoint.parts):
        reader, line = part % size, f"reading file {part + 1} of a checkpoint together"
        with session.activity.doing(line, START_FACTOR, after_others=True):
            for name, (shape, dtype) in forms.items():
                if name.startswith(SYNC):
                    continue
                tensor = checkpoint.read[name] if rank == reader else np.empty(shape, dtype)
                if session.world.communicator is not None:
                    memory = tensor.reshape(-1).view(np.uint8).data
                    broadcast_memory(session.world.communicator, memory, reader)
                if name in names:
                    held[name] = tensor
        states = {name for name in forms if name.startswith(SYNC) and name in names}
        if states:
            entry, path = checkpoint.entries[part], checkpoint.path
            read = partial(read_verified, path, entry)
            source = checkpoint.read if rank == reader else patiently(read)
            held |= {name: source[name] for name in states}
    return held


def _difference(checkpoint: Mapping[str, Shape], model: Mapping[str, Shape]) -> str:
    """Return where a checkpoint and a model first differ, and how often; empty if they do not."""
    names = [name for name in {**model, **checkpoint} if checkpoint.get(name) != model.get(name)]
    if not names:
        return ""
    old, new = (_in_words(shapes.get(names[0])) for shapes in (checkpoint, model))
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]} is {old} in the checkpoint, {new} in the model{more}"


def _in_words(shape: Shape | None) -> str:
    return "absent" if shape is None else " x ".join(map(str, shape)) or "one number"
