"""Resuming from a checkpoint, under the plan that the run has now."""

import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hvdtrain import configfile
from hvdtrain.checkpoint import replication, store
from hvdtrain.checkpoint.format import (
    PAUSES,
    Damaged,
    Entry,
    Manifest,
    Unreadable,
    patiently,
    read_manifest,
)
from hvdtrain.checkpoint.store import MODEL, SYNC
from hvdtrain.checkpoint.tensorfile import read_verified
from hvdtrain.engine.folders import RunFolder
from hvdtrain.engine.progress import Progress
from hvdtrain.engine.session import Session, Shape
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host.activity import START_FACTOR
from hvdtrain.transfer import broadcast_memory
from hvdtrain.world import World

Value = TypeVar("Value")
Forms = dict[str, tuple[Shape, np.dtype[Any]]]  # of tensors, by name

SECONDS_TO_SHOW = 30.0  # until a network file system shows a folder to other hosts


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
    home = replication.home_of(directory, run.path, world.rank) if directory else None
    local = [path.name for path in store.stored(folder)] + (
        replication.copied(home) if home else []
    )
    names = {name for rank_names in _gather(session, local) for name in rank_names}
    faulty: list[tuple[Path, DataError]] = []
    for name in sorted(names, key=store.step_of, reverse=True):
        path = folder / name  # it exists at least in part
        outcome = fault = _verify(path, session)
        if isinstance(fault, DataError) and home is not None:
            unrepaired = None
            try:
                replication.repair(path, home)
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
        until = time.monotonic() + SECONDS_TO_SHOW
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
