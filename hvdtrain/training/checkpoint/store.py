"""The folder of a run's checkpoints: written under a temporary name, found, verified, pruned.

A checkpoint is a folder `step-00000123` that holds `manifest.json` and one part for each rank that
wrote. It is made in a folder of another name, flushed to the disk and renamed: what carries the
final name is whole.
"""

import json
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hvdtrain import files
from hvdtrain.errors import DataError, UsageError
from hvdtrain.ownership import Owner
from hvdtrain.training.checkpoint import manifest as manifests
from hvdtrain.training.checkpoint import partfile
from hvdtrain.training.checkpoint.manifest import MANIFEST, Manifest
from hvdtrain.training.checkpoint.partfile import Entry

NAME = re.compile(r"step-(\d{8,18})")
UNFINISHED = ".unfinished-"
REPLACED, REMOVED = f"{UNFINISHED}replaced-", f"{UNFINISHED}removed-"
SET_ASIDE = "damaged-"
BEST = "best.json"
MODEL, OPTIMIZER = "model/", "optimizer/"
Kept = TypeVar("Kept")
RECEIPT_SECONDS = 60.0  # a network file system may show another rank's file this late


@dataclass(frozen=True)
class Checkpoint:
    """A training state.

    Attributes:
        tensors: parameters and buffers by name.
        optimizer: the optimizer's tensors by parameter name and by their own.
        progress: position, counts and sizes, as the loop keeps them.
    """

    tensors: dict[str, np.ndarray]
    optimizer: dict[str, dict[str, np.ndarray]]
    progress: dict[str, Any]


def write_part(
    folder: Path, name: str, rank: int, tensors: dict[str, np.ndarray], token: str = ""
) -> Entry:
    """Write a rank's part of the checkpoint `name`, and leave a receipt beside it.

    Args:
        token: of the run; no two runs write to one unfinished checkpoint.

    Raises:
        DataError: if it cannot be written.
    """
    temporary = _unfinished(folder, name, token)
    part = temporary / manifests.part_name(rank)
    try:
        temporary.mkdir(exist_ok=True)
        entry = partfile.write(part, tensors)
        receipt = json.dumps(asdict(entry)).encode()
        files.write_whole(_receipt(temporary, rank), lambda file: file.write(receipt))
    except OSError as error:
        with suppress(OSError):
            part.unlink()  # the disk may be full; other ranks may be writing beside it
        raise _not_written(folder / name, error) from None
    return entry


def commit(
    folder: Path,
    name: str,
    writers: Sequence[int],
    progress: dict[str, Any],
    configuration: dict[str, Any],
    owner: Owner | None = None,
) -> Path:
    """Make the checkpoint of the parts that the ranks `writers` have written; return its path.

    Args:
        owner: of the folder, compared before the checkpoint gets its name.

    Raises:
        DataError: if it cannot be written; what was there before is untouched.
        UsageError: if the folder is no longer the owner's; it is left as it is.
    """
    final, temporary = folder / name, _unfinished(folder, name, owner.token if owner else "")
    try:
        _complete(temporary, writers, progress, configuration)
        if owner is not None:
            owner.check()
        _give_name(temporary, final)
    except (OSError, UsageError, DataError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if owner is not None:
            owner.check()  # another run may have removed what this one had begun
        restore_replaced(folder)
        raise _not_written(final, error) from None
    return final


def _complete(
    temporary: Path,
    writers: Sequence[int],
    progress: dict[str, Any],
    configuration: dict[str, Any],
) -> None:
    """Read every part back, and bring it to the disk with a manifest in place of the receipts."""
    parts = tuple(_read_receipt(_receipt(temporary, rank)) for rank in writers)
    for part in parts:
        partfile.patiently(partial(partfile.verify, temporary, part))
    text = Manifest(parts, progress, configuration).to_json()
    files.write_whole(temporary / MANIFEST, lambda file: file.write(text.encode()))
    for rank in writers:
        _receipt(temporary, rank).unlink()
    files.sync_folder(temporary)


def _give_name(temporary: Path, final: Path) -> None:
    """Rename what is complete; a checkpoint of the same step is there until then."""
    replaced = final.with_name(f"{REPLACED}{final.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    files.sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def discard(folder: Path, name: str, rank: int, token: str) -> None:
    """Remove what a rank has written of a checkpoint that is given up; no other rank's part."""
    temporary = _unfinished(folder, name, token)
    for path in (temporary / manifests.part_name(rank), _receipt(temporary, rank)):
        with suppress(OSError):
            path.unlink()
    with suppress(OSError):  # of the last rank
        temporary.rmdir()


def mark_best(folder: Path, name: str, metric: str, value: float) -> None:
    """Point `best.json` at the checkpoint `name`.

    Raises:
        DataError: if it cannot be written.
    """
    files.write_text(
        folder / BEST,
        json.dumps({"checkpoint": name, "metric": metric, "value": value}),
        "the file",
        DataError,
    )


def prune(folder: Path, keep_last: int, newest: str | None = None) -> None:
    """Remove all but the newest `keep_last` checkpoints and the best one.

    Args:
        newest: has just been read back. Those of later steps are what a run that resumed from an
            earlier one could not use: they neither count nor go.
    """
    before = [
        path for path in stored(folder) if newest is None or step_of(path.name) <= step_of(newest)
    ]
    kept = {path.name for path in before[-keep_last:]}
    if (marked := best(folder)) is not None:
        kept.add(marked.name)
    for path in before:
        if path.name not in kept:
            # Renamed first: what carries its name is whole.
            removed = path.with_name(f"{REMOVED}{path.name}")
            with suppress(OSError):
                path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)


def restore_replaced(folder: Path) -> None:
    """Give back its name to what was to be replaced, where a kill left nothing in its place."""
    for path in folder.glob(f"{REPLACED}step-*"):
        final = folder / path.name.removeprefix(REPLACED)
        if not final.exists():
            with suppress(OSError):
                path.rename(final)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that failed to verify, so that it does not count as one of the newest.

    Raises:
        DataError: if it cannot be renamed.
    """
    aside = path.with_name(f"{SET_ASIDE}{path.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    except OSError as error:
        raise DataError(f"{path} is damaged and cannot be renamed: {error.strerror}") from None
    return aside


def clean(folder: Path) -> None:
    """Remove what a run left unfinished that does not own the folder any more."""
    for path in folder.glob(f"{UNFINISHED}*"):
        # Renamed first: that run may still live, and must not be able to finish it.
        removed = folder / f"{REMOVED}{secrets.token_hex(8)}"
        with suppress(OSError):
            path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    for path in folder.glob(f".{BEST}.*"):
        path.unlink(missing_ok=True)


def best(folder: Path) -> Path | None:
    """The checkpoint that `best.json` points at, None where it points at none."""
    try:
        name = str(json.loads((folder / BEST).read_text())["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return folder / name if NAME.fullmatch(name) and (folder / name).is_dir() else None


def stored(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: step_of(path.name))


def name_of(step: int) -> str:
    """The folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """The step after which a checkpoint of this name was made."""
    return int(name.removeprefix("step-"))


def load_newest(folder: Path) -> tuple[Checkpoint | None, Path | None, list[str]]:
    """The newest checkpoint that verifies, its path, and a line for each newer one that fails."""
    skipped: list[str] = []
    for path in reversed(stored(folder)):
        try:
            return load(path), path, skipped
        except DataError as error:
            skipped.append(str(error))
    return None, None, skipped


def load(path: Path) -> Checkpoint:
    """Read and verify one whole checkpoint.

    Raises:
        DataError: if a file is missing, differs from its hash, or holds something else.
    """
    manifest = manifests.read(path)
    held: dict[str, np.ndarray] = {}
    for entry in manifest.parts:
        partfile.verify(path, entry)
        part = partfile.read(path / entry.name)
        if part.keys() & held.keys():
            raise DataError(f"{path} holds a tensor twice")
        held |= part
    tensors, optimizer = by_kind(held)
    return Checkpoint(tensors, optimizer, manifest.progress)


def by_kind(held: dict[str, Kept]) -> tuple[dict[str, Kept], dict[str, dict[str, Kept]]]:
    """The model's tensors by name, and the optimizer's by parameter and their own name.

    Raises:
        DataError: if a name is neither.
    """
    tensors: dict[str, Kept] = {}
    optimizer: dict[str, dict[str, Kept]] = {}
    for name, tensor in held.items():
        parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
        if name.startswith(MODEL):
            tensors[name.removeprefix(MODEL)] = tensor
        elif name.startswith(OPTIMIZER) and parameter:
            optimizer.setdefault(parameter, {})[key] = tensor
        else:
            raise DataError(f"a checkpoint holds no {name[:60]!r}")
    return tensors, optimizer


def owners(sizes: Sequence[int], count: int) -> list[int]:
    """Which of `count` owners, about equally loaded, has each of `sizes`; in ascending order."""
    whole, begin, found = max(1, sum(sizes)), 0, []
    for size in sizes:
        found.append(min(count - 1, (2 * begin + size) * count // (2 * whole)))
        begin += size
    return found


def _unfinished(folder: Path, name: str, token: str) -> Path:
    return folder / f"{UNFINISHED}{token}-{name}"


def _receipt(folder: Path, rank: int) -> Path:
    return folder / f"written-{rank:04d}.json"


def _read_receipt(path: Path) -> Entry:
    until = time.monotonic() + RECEIPT_SECONDS
    while not path.exists() and time.monotonic() < until:
        list(path.parent.iterdir())  # makes a network file system look again
        time.sleep(0.1)
    return Entry(**json.loads(path.read_text()))


def _not_written(path: Path, error: Exception) -> DataError:
    reason = error.strerror if isinstance(error, OSError) else error
    return DataError(f"the checkpoint {path} cannot be written: {reason}")
