"""Going on from a checkpoint, under whatever plan the run has now."""

import socket
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hvdtrain import configfile
from hvdtrain.errors import DataError, UsageError
from hvdtrain.training.checkpoint import copies, partfile, store
from hvdtrain.training.checkpoint import manifest as manifests
from hvdtrain.training.checkpoint.manifest import Manifest
from hvdtrain.training.checkpoint.partfile import PAUSES, Damaged, Unreadable
from hvdtrain.training.checkpoint.store import MODEL
from hvdtrain.training.console import Console
from hvdtrain.training.metrics import RunFolder
from hvdtrain.training.progress import Progress
from hvdtrain.training.session import Session, Shape
from hvdtrain.training.stall import START_FACTOR
from hvdtrain.world import World

Value = TypeVar("Value")

SECONDS_TO_SHOW = 30.0  # in which a network file system shows a folder to other hosts


@dataclass(frozen=True)
class _Found:
    """A checkpoint whose parts are as its manifest says: which of them holds what."""

    path: Path
    progress: dict[str, Any]
    configuration: dict[str, Any]
    places: dict[str, str]
    shapes: dict[str, Shape]


def restore(session: Session, run: RunFolder, console: Console) -> dict[str, Any] | None:
    """Put the newest checkpoint that verifies into model and optimizer; the progress it holds.

    Collective. None where the folder holds no checkpoint at all. Those that are damaged are set
    aside; one that cannot be read just now is not, and ends the search.

    Raises:
        UsageError: if it is of another data set, configuration or model.
        DataError: if none verifies, or the disk does not give the newest one.
    """
    with session.activity.doing("reading a checkpoint", START_FACTOR):
        return _restore(session, run, console)


def _restore(session: Session, run: RunFolder, console: Console) -> dict[str, Any] | None:
    here, folder = session.world, run.checkpoints.resolve()
    directory = session.config.replicate
    home = copies.home(directory, run.path, here.rank) if directory else None
    faulty: list[tuple[Path, DataError]] = []
    for path in _candidates(folder, home, session):
        found = fault = _verify(path, session)
        if isinstance(fault, DataError) and home is not None:
            found = _mend(path, home, session)
            if isinstance(found, _Found):
                console.say(f"mended {path.name} from the copies of --replicate: {fault}")
        if isinstance(found, Unreadable):
            raise DataError(
                f"{found}, {len(PAUSES) + 1} times in a row: nothing was changed; look at the "
                "disk, then start again"
            )
        if isinstance(found, DataError):
            faulty.append((path, found))
            continue
        _put(session, found)
        for other, why in faulty:
            console.say(f"skipped a checkpoint{_set_aside(other, why, here)}: {why}")
        return found.progress
    if faulty:
        raise DataError(f"{folder} holds no checkpoint that verifies: {faulty[0][1]}")
    return None


def _set_aside(path: Path, fault: DataError, here: World) -> str:
    """Rename a checkpoint that is damaged; what it is called now, for the line that says so."""
    if not isinstance(fault, Damaged):
        return f", {path.name}"
    is_there = here.rank == 0 and path.exists()
    return f", now {(store.set_aside(path) if is_there else path).name}"


def _waiting(session: Session) -> AbstractContextManager[None]:
    """The wait until all ranks have read what is theirs."""
    line = "waiting for all ranks to read a checkpoint"
    return session.activity.doing(line, START_FACTOR, after_others=True)


def _gather(session: Session, value: Value) -> list[Value]:
    with _waiting(session):
        return session.world.gather(value)


def _candidates(folder: Path, home: Path | None, session: Session) -> list[Path]:
    """All checkpoints of which there is something, the newest first."""
    own = [path.name for path in store.stored(folder)]
    told = _gather(session, [*own, *(copies.names(home) if home else [])])
    names = {name for theirs in told for name in theirs}
    return [folder / name for name in sorted(names, key=store.step_of, reverse=True)]


def _mend(path: Path, home: Path, session: Session) -> _Found | DataError:
    """The checkpoint with what the ranks' copies give back of it, or what is still wrong."""
    fault = None
    try:
        copies.mend(path, home)
    except DataError as error:
        fault = error
    return _worst(_gather(session, fault)) or _verify(path, session)


def _verify(path: Path, session: Session) -> _Found | DataError:
    """What a checkpoint holds, or what is wrong with it: the same on all ranks.

    Each rank reads its share of the parts, whoever wrote them.
    """
    here = session.world
    manifest = _manifest(path) if here.rank == 0 else None
    with _waiting(session):
        manifest = here.broadcast(manifest)
    if isinstance(manifest, DataError):
        return manifest
    fault, mine = None, dict[str, dict[str, Shape]]()
    try:
        _wait_for(path)
        for entry in manifest.parts[here.rank :: here.size]:
            with session.activity.doing("reading a checkpoint", START_FACTOR):
                partfile.patiently(partial(partfile.verify, path, entry))
                shapes_of = partial(partfile.shapes, path / entry.name)
                mine[entry.name] = partfile.patiently(shapes_of)
    except DataError as error:
        fault = error
    told = _gather(session, (fault, mine))
    if worst := _worst([theirs for theirs, _ in told]):
        return worst
    parts = {part: shapes for _, theirs in told for part, shapes in theirs.items()}
    places = {name: part for part, shapes in parts.items() for name in shapes}
    if len(places) != sum(map(len, parts.values())):
        return Damaged(f"{path} holds a tensor twice")
    shapes = {name: shape for held in parts.values() for name, shape in held.items()}
    return _Found(path, manifest.progress, manifest.configuration, places, shapes)


def _worst(faults: Sequence[DataError | None]) -> DataError | None:
    """Of what ranks found, what decides: no rank renames what another one could not read."""

    def order(fault: DataError) -> int:
        return 0 if isinstance(fault, Unreadable) else 2 if isinstance(fault, Damaged) else 1

    return min((fault for fault in faults if fault is not None), key=order, default=None)


def _wait_for(path: Path) -> None:
    """Return once the disk shows this host what rank 0 sees."""
    until = time.monotonic() + SECONDS_TO_SHOW
    while not path.is_dir():
        if time.monotonic() > until:
            raise Unreadable(f"{path} is not there on {socket.gethostname()}")
        time.sleep(0.1)


def _manifest(path: Path) -> Manifest | DataError:
    try:
        manifest = partfile.patiently(partial(manifests.read, path))
        try:
            Progress.of(manifest.progress)
        except DataError as error:
            return Damaged(f"{path} {error}")
    except DataError as error:
        return error
    return manifest


def _put(session: Session, found: _Found) -> None:
    """Give each rank what it holds.

    Raises:
        UsageError: if the checkpoint is of another data set, configuration or model.
        DataError: if it lacks what it should hold, or holds something else.
    """
    config, trained_on = session.config, found.progress["index_hash"]
    if trained_on != session.index.hash:
        raise UsageError(
            f"{config.data} (index {session.index.hash[:8]}) is not the data set that this run "
            f"was trained on (index {trained_on[:8]}): give that one as --data"
        )
    # What was asked for is what config.yaml says; who replaced that file replaced no checkpoint.
    if changed := configfile.differences(found.configuration, config):
        raise UsageError(
            f"{found.path} was made with another configuration than config.yaml has now "
            f"({'; '.join(changed)}): restore that file, or choose another --run"
        )
    model = {
        name.removeprefix(MODEL): shape
        for name, shape in found.shapes.items()
        if name.startswith(MODEL)
    }
    if difference := _difference(model, session.shapes):
        raise UsageError(
            f"{found.path} holds the parameters of another model than --model {config.model}: "
            f"{difference}; use the code of the model that the run was started with, "
            "or another --run"
        )
    progress = found.progress
    own = session.expected(progress["step"] > progress.get("skipped_steps", 0))
    for name, shape in own.items():
        if found.shapes.get(name) != shape:
            raise DataError(f"{found.path} holds no {name} of shape {shape}")
    held = {
        name: tensor
        for part in sorted({found.places[name] for name in own})
        for name, tensor in _read(found.path / part, own.keys()).items()
    }
    session.put(held)


def _read(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    return partfile.patiently(partial(partfile.read, path, names))


def _difference(checkpoint: Mapping[str, Shape], model: Mapping[str, Shape]) -> str:
    """Say where a checkpoint and a model first differ, and how often; empty if they do not."""
    names = [name for name in {**model, **checkpoint} if checkpoint.get(name) != model.get(name)]
    if not names:
        return ""
    old, new = (_in_words(shapes.get(names[0])) for shapes in (checkpoint, model))
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]} is {old} in the checkpoint, {new} in the model{more}"


def _in_words(shape: Shape | None) -> str:
    return "absent" if shape is None else " x ".join(map(str, shape)) or "one number"
