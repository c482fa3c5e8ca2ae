"""Going on from a checkpoint, under whatever plan the run has now."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import DataError, UsageError
from hvdtrain.training.checkpoint import copies, partfile, store
from hvdtrain.training.checkpoint import manifest as manifests
from hvdtrain.training.checkpoint.manifest import Manifest
from hvdtrain.training.checkpoint.store import MODEL
from hvdtrain.training.console import Console
from hvdtrain.training.metrics import RunFolder
from hvdtrain.training.progress import Progress
from hvdtrain.training.session import Session, Shape
from hvdtrain.world import World


@dataclass(frozen=True)
class _Found:
    """A checkpoint whose parts are as its manifest says: which of them holds what."""

    path: Path
    progress: dict[str, Any]
    places: dict[str, str]
    shapes: dict[str, Shape]


def restore(session: Session, run: RunFolder, console: Console) -> dict[str, Any] | None:
    """Put the newest checkpoint that verifies into model and optimizer; the progress it holds.

    Collective. None where the folder holds no checkpoint at all. Those that fail are set aside.

    Raises:
        UsageError: if it is of another data set or another model.
        DataError: if none verifies.
    """
    here, folder = session.world, run.checkpoints.resolve()
    directory = session.config.replicate
    home = copies.home(directory, run.path, here.rank) if directory else None
    faulty: list[tuple[Path, str]] = []
    for path in _candidates(folder, home, here):
        found, fault = _verify(path, here)
        if found is None and home is not None:
            found, why = _mend(path, home, here)
            if found is not None:
                console.say(f"mended {path.name} from the copies of --replicate: {fault}")
            fault = why or fault
        if found is None:
            faulty.append((path, fault))
            continue
        _put(session, found)
        for other, why in faulty:
            is_there = here.rank == 0 and other.exists()
            aside = store.set_aside(other) if is_there else other
            console.say(f"skipped a checkpoint, now {aside.name}: {why}")
        return found.progress
    if faulty:
        raise DataError(f"{folder} holds no checkpoint that verifies: {faulty[0][1]}")
    return None


def _candidates(folder: Path, home: Path | None, here: World) -> list[Path]:
    """All checkpoints of which there is something, the newest first."""
    own = [path.name for path in store.stored(folder)]
    told = here.gather([*own, *(copies.names(home) if home else [])])
    names = {name for theirs in told for name in theirs}
    return [folder / name for name in sorted(names, key=store.step_of, reverse=True)]


def _mend(path: Path, home: Path, here: World) -> tuple[_Found | None, str]:
    """The checkpoint with what the ranks' copies give back of it, or what is still wrong."""
    fault = ""
    try:
        copies.mend(path, home)
    except DataError as error:
        fault = str(error)
    faults = [line for line in here.gather(fault) if line]
    return (None, faults[0]) if faults else _verify(path, here)


def _verify(path: Path, here: World) -> tuple[_Found | None, str]:
    """What a checkpoint holds, or what is wrong with it: the same on all ranks.

    Each rank reads its share of the parts, whoever wrote them.
    """
    manifest, fault = here.broadcast(_manifest(path) if here.rank == 0 else None)
    if manifest is None:
        return None, fault
    mine: dict[str, dict[str, Shape]] = {}
    try:
        for entry in manifest.parts[here.rank :: here.size]:
            partfile.verify(path, entry)
            mine[entry.name] = partfile.shapes(path / entry.name)
    except DataError as error:
        fault = str(error) if path.exists() else f"{path} is not there on {socket.gethostname()}"
    told = here.gather((fault, mine))
    faults = [line for line, _ in told if line]
    if faults:
        return None, faults[0]
    parts = {part: shapes for _, theirs in told for part, shapes in theirs.items()}
    places = {name: part for part, shapes in parts.items() for name in shapes}
    if len(places) != sum(map(len, parts.values())):
        return None, f"{path} holds a tensor twice"
    shapes = {name: shape for held in parts.values() for name, shape in held.items()}
    return _Found(path, manifest.progress, places, shapes), ""


def _manifest(path: Path) -> tuple[Manifest | None, str]:
    try:
        manifest = manifests.read(path)
        try:
            Progress.of(manifest.progress)
        except DataError as error:
            raise DataError(f"{path} {error}") from None
    except DataError as error:
        return None, str(error)
    return manifest, ""


def _put(session: Session, found: _Found) -> None:
    """Give each rank what it holds.

    Raises:
        UsageError: if the checkpoint is of another data set or model.
        DataError: if it lacks what it should hold, or holds something else.
    """
    config, trained_on = session.config, found.progress["index_hash"]
    if trained_on != session.index.hash:
        raise UsageError(
            f"{config.data} (index {session.index.hash[:8]}) is not the data set that this run "
            f"was trained on (index {trained_on[:8]}): give that one as --data"
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
        for name, tensor in partfile.read(found.path / part, own.keys()).items()
    }
    session.put(held)


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
