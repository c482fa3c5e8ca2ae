"""The folder of a run's checkpoints: writing, listing, verifying and removing them.

A checkpoint is a folder `step-00000123` that holds `manifest.json` and one file for each rank that
wrote. It is made in a folder of another name, flushed to the disk and renamed: a folder with the
final name is complete. A rank's file is copied while training waits, and written while it
continues.
"""

import json
import os
import re
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hvdtrain.checkpoint.tensorfile import (
    MANIFEST,
    Entry,
    Manifest,
    check_size,
    part_name,
    patiently,
    read_manifest,
    read_verified,
    verify,
    write_tensors,
)
from hvdtrain.errors import DataError, UsageError, on_one_line
from hvdtrain.host import files, records
from hvdtrain.host.activity import SAVE_FACTOR, Activity
from hvdtrain.host.ownership import Owner

NAME = re.compile(r"step-(\d{8,18})")
UNFINISHED = ".unfinished-"
REPLACED, REMOVED = f"{UNFINISHED}replaced-", f"{UNFINISHED}removed-"
SET_ASIDE = "damaged-"
BEST = "best.json"
OR_LAST = "restore it, or choose the newest checkpoint with --which last"
MODEL, OPTIMIZER, SYNC, EXTRA = "model/", "optimizer/", "sync/", "extra/"
Kept = TypeVar("Kept")
FILES, FILE_BYTES = 8, 64 * 2**20  # a stage has more files than this only if they are this large
RECEIPT_SECONDS = 60.0  # until a network file system shows another rank's file


@dataclass(frozen=True)
class Checkpoint:
    """A training state.

    Attributes:
        tensors: parameters and buffers by name.
        optimizer: the optimizer's tensors by parameter name and their own name.
        progress: position, counts and sizes, as in the training loop.
        sync: the state of the ways in which replicas agree, by name.
        extra: the state of modules beside their tensors, by name.
    """

    tensors: dict[str, np.ndarray]
    optimizer: dict[str, dict[str, np.ndarray]]
    progress: dict[str, Any]
    sync: dict[str, np.ndarray] = field(default_factory=dict)
    extra: dict[str, np.ndarray] = field(default_factory=dict)


def write_part(
    folder: Path, name: str, rank: int, tensors: dict[str, np.ndarray], token: str = ""
) -> None:
    """Write a rank's file of the checkpoint `name`, read it back, and put a receipt beside it.

    Args:
        token: of the run, so that no two runs write to the same unfinished checkpoint.

    Raises:
        DataError: if it cannot be written.
    """
    temporary = _unfinished(folder, name, token)
    part = temporary / part_name(rank)
    try:
        temporary.mkdir(exist_ok=True)
        entry = write_tensors(part, tensors)
        patiently(partial(verify, temporary, entry))
        receipt = json.dumps(asdict(entry)).encode()
        files.write_whole(_receipt(temporary, rank), lambda file: file.write(receipt))
    except (OSError, DataError) as error:
        with suppress(OSError):
            part.unlink()  # the disk may be full, and other ranks may still be writing
        raise _not_written(folder / name, error) from None


def commit(
    folder: Path,
    name: str,
    writers: Sequence[int],
    progress: dict[str, Any],
    configuration: dict[str, Any],
    owner: Owner | None = None,
) -> Path:
    """Commit the checkpoint from the files that the ranks `writers` have written.

    Args:
        owner: of the folder, checked before the checkpoint gets its final name.

    Returns:
        The path of the checkpoint.

    Raises:
        DataError: if it cannot be written; an earlier checkpoint of the step remains.
        UsageError: if the folder is no longer the owner's; it remains as it is.
    """
    final, temporary = folder / name, _unfinished(folder, name, owner.token if owner else "")
    try:
        parts = tuple(_read_receipt(_receipt(temporary, rank)) for rank in writers)
        for part in parts:  # each rank has read its own file back: is it still there?
            patiently(partial(check_size, temporary / part.name, part))
        text = Manifest(parts, progress, configuration).to_json()
        files.write_whole(temporary / MANIFEST, lambda file: file.write(text.encode()))
        for rank in writers:
            _receipt(temporary, rank).unlink()
        files.sync(temporary)
        if owner is not None:
            owner.check()
        replaced = final.with_name(f"{REPLACED}{name}")  # an earlier checkpoint of the step
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        files.sync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, UsageError, DataError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if owner is not None:
            owner.check()  # another run may have removed the unfinished checkpoint
        restore_replaced(folder)
        raise _not_written(final, error) from None
    return final


def discard(folder: Path, name: str, rank: int, token: str) -> None:
    """Remove a rank's files of a checkpoint that failed; those of other ranks remain."""
    temporary = _unfinished(folder, name, token)
    for path in (temporary / part_name(rank), _receipt(temporary, rank)):
        with suppress(OSError):
            path.unlink()
    with suppress(OSError):  # only the last rank finds the folder empty
        temporary.rmdir()


def mark_best(folder: Path, name: str, metric: str, value: float) -> None:
    """Point `best.json` at the checkpoint `name`.

    Raises:
        DataError: if it cannot be written.
    """
    files.write_text(
        folder / BEST,
        json.dumps(asdict(Best(name, metric, value))),
        "the file",
        DataError,
    )


def prune(folder: Path, keep_last: int, newest: str | None = None) -> None:
    """Remove all but the newest `keep_last` checkpoints and the best one.

    Args:
        newest: the checkpoint that was just committed. Checkpoints of later steps are those that
            a resumed run could not use: they do not count, and they are not removed.
    """
    before = [
        path for path in stored(folder) if newest is None or step_of(path.name) <= step_of(newest)
    ]
    kept = {path.name for path in before[-keep_last:]}
    with suppress(DataError):  # a commit has just written the file
        kept |= {marked.name for marked in [best(folder)] if marked is not None}
    for path in before:
        if path.name not in kept:
            # Renamed first: a folder with the final name is complete.
            removed = path.with_name(f"{REMOVED}{path.name}")
            with suppress(OSError):
                path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)


def restore_replaced(folder: Path) -> None:
    """Rename a checkpoint back if a kill came after it was moved away, before its replacement."""
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
    """Remove unfinished checkpoints of runs that no longer own the folder."""
    for path in folder.glob(f"{UNFINISHED}*"):
        # Renamed first: the other run may be alive, and must not be able to commit it.
        removed = folder / f"{REMOVED}{secrets.token_hex(8)}"
        with suppress(OSError):
            path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    for path in folder.glob(f".{BEST}.*"):
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Best:
    """The content of `best.json`: the checkpoint with the best value of a metric."""

    checkpoint: str
    metric: str = ""
    value: float | None = None


def best(folder: Path) -> Path | None:
    """Return the checkpoint that `best.json` points at, None if there is no such file.

    Raises:
        DataError: if the file is damaged, or the checkpoint is missing.
    """
    if (marked := records.read(folder / BEST, Best, OR_LAST)) is None:
        return None
    path = folder / marked.checkpoint
    if not NAME.fullmatch(marked.checkpoint) or not path.is_dir():
        named = on_one_line(marked.checkpoint)
        raise DataError(f"{folder / BEST} names {named}, which is no checkpoint here: {OR_LAST}")
    return path


def stored(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    checkpoints = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(checkpoints, key=lambda path: step_of(path.name))


def name_of(step: int) -> str:
    """Return the folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Return the step after which a checkpoint of this name was made."""
    return int(name.removeprefix("step-"))


def load_newest(folder: Path) -> tuple[Checkpoint | None, Path | None, list[str]]:
    """Return the newest checkpoint that verifies, its path, and the error of each newer one."""
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
        DataError: if a file is missing, differs from its hash, or has the wrong content.
    """
    manifest = read_manifest(path)
    held: dict[str, np.ndarray] = {}
    for entry in manifest.parts:
        part = read_verified(path, entry)
        if part.keys() & held.keys():
            raise DataError(f"{path} contains a tensor twice")
        held |= part
    tensors, optimizer = by_kind(held)
    return Checkpoint(
        tensors, optimizer, manifest.progress, of_kind(held, SYNC), of_kind(held, EXTRA)
    )


def of_kind(named: Mapping[str, Kept], kind: str) -> dict[str, Kept]:
    """Return what belongs to one kind, such as SYNC, by its name without that prefix."""
    return {name.removeprefix(kind): named[name] for name in named if name.startswith(kind)}


def by_kind(held: dict[str, Kept]) -> tuple[dict[str, Kept], dict[str, dict[str, Kept]]]:
    """Return the model's tensors by name, and the optimizer's by parameter and their own name.

    Other kinds are left out.

    Raises:
        DataError: if a name belongs to none of them.
    """
    tensors: dict[str, Kept] = {}
    optimizer: dict[str, dict[str, Kept]] = {}
    for name, tensor in held.items():
        parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
        if name.startswith(MODEL):
            tensors[name.removeprefix(MODEL)] = tensor
        elif name.startswith(OPTIMIZER) and parameter:
            optimizer.setdefault(parameter, {})[key] = tensor
        elif not name.startswith((SYNC, EXTRA)):
            raise DataError(f"{name[:60]!r} is not the name of a tensor in a checkpoint")
    return tensors, optimizer


def owners(sizes: Sequence[int], count: int) -> list[int]:
    """Return the owner, 0 to `count` - 1, of each tensor: ascending, about equally loaded.

    Many ranks do not all own some: a thousand small files cost a shared file system more time than
    their bytes.

    Args:
        sizes: bytes of each tensor.
        count: number of ranks that hold the tensors.
    """
    total, start, numbers = max(1, sum(sizes)), 0, []
    writers = min(count, max(FILES, total // FILE_BYTES))
    for size in sizes:
        writer = min(writers - 1, (2 * start + size) * writers // (2 * total))
        numbers.append(writer * count // writers)  # neighbours share a host
        start += size
    return numbers


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


# The kernel's nice value: the writing thread yields to threads that compute.
NICE = 10
WITHDRAWAL_SECONDS = 10.0  # for a write in progress; the disk may hang


@dataclass
class _Open:
    """A checkpoint that was started, and whose outcome is not known to all ranks.

    Attributes:
        settle: called once all files are written.
        writes: whether this rank has a file to write.
        pending: whether its files are being written, or are written and not yet committed.
    """

    name: str
    settle: Callable[[], object]
    writes: bool
    pending: bool = True


class Saver:
    """Writes a rank's checkpoint files in a separate thread. All ranks start it together.

    A checkpoint is pending from `begin` to `settle`: its files are being written, or are written
    and not yet committed. It is open from `begin` until all ranks know whether it was made.

    Args:
        activity: of this thread only: it may hang while training continues.
    """

    def __init__(self, folder: Path, rank: int, token: str, activity: Activity) -> None:
        self.folder, self.rank, self.token, self.activity = folder, rank, token, activity
        self._open: _Open | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_open(self) -> bool:
        """Return whether a checkpoint was started whose outcome is not known to all ranks."""
        return self._open is not None

    @property
    def writes(self) -> bool:
        """Return whether this rank has a file of the open checkpoint: of many, only some have."""
        return self._open is not None and self._open.writes

    @property
    def is_uncommitted(self) -> bool:
        """Return whether the open checkpoint does not have its final name yet."""
        return self._open is not None and not (self.folder / self._open.name).exists()

    @property
    def pending(self) -> bool:
        """Return whether the open checkpoint is not yet being committed."""
        return self._open is not None and self._open.pending

    @property
    def written(self) -> bool:
        """Return whether this rank's file of the pending checkpoint is on the disk."""
        busy = self._thread is not None and self._thread.is_alive()
        return self.pending and not busy and self._error is None

    @property
    def settled(self) -> bool:
        """Return whether this rank has done its part of committing the open checkpoint."""
        busy = self._thread is not None and self._thread.is_alive()
        return self.is_open and not self.pending and not busy and self._error is None

    @property
    def failed(self) -> bool:
        """Return whether this rank could not write its file of the open checkpoint."""
        return isinstance(self._error, DataError)

    def begin(
        self,
        name: str,
        copy: Callable[[], dict[str, np.ndarray]],
        settle: Callable[[], object],
        error: DataError | None = None,
    ) -> None:
        """Start to write the arrays that `copy` returns, if any, as this rank's file of `name`.

        Args:
            copy: copies the tensors, into memory that is free again once the file is written.
            settle: called once all files are written; rank 0 commits the checkpoint.
            error: why this rank failed before it could start, to be reported to the others.
        """
        assert not self.is_open, "one checkpoint at a time"
        self.join()
        copies = copy()
        self._open, self._error = _Open(name, settle, writes=bool(copies)), error
        if error is not None or not copies:
            return
        self._start(name, lambda: write_part(self.folder, name, self.rank, copies, self.token))

    def settle(self) -> None:
        """Do the rest in the thread, now that all ranks have written their files."""
        assert self._open is not None, "no checkpoint is open"
        self.join()
        self._open.pending = False
        self._start(self._open.name, self._open.settle)

    def end(self) -> None:
        """Close the checkpoint, whose outcome all ranks know; remove the files of a failed one."""
        assert self._open is not None, "no checkpoint is open"
        self.join()
        if self._open.pending or self.failed:
            discard(self.folder, self._open.name, self.rank, self.token)
        self._open = self._error = None

    def withdraw(self) -> None:
        """Remove this rank's files of the open checkpoint, in a folder that is another run's."""
        if self._thread is not None:
            self._thread.join(WITHDRAWAL_SECONDS)
        if self._open is not None:
            discard(self.folder, self._open.name, self.rank, self.token)

    @property
    def fault(self) -> str:
        """The message of a failed write; empty if nothing failed."""
        return str(self._error) if self.failed else ""

    def join(self) -> None:
        """Return once the thread has nothing to do.

        Raises:
            UsageError: if the run folder is no longer this run's.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise an error of the thread, except for a failure of the disk: it may be temporary.

        Raises:
            UsageError: if the run folder is no longer this run's.
        """
        if self._error is not None and not self.failed:
            error, self._error = self._error, None
            raise error

    def _start(self, name: str, work: Callable[[], object]) -> None:
        def run() -> None:
            if sys.platform == "linux":  # on other systems threads have no separate priority
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            try:
                with self.activity.doing(f"writing {name}", SAVE_FACTOR):
                    work()
            except BaseException as error:  # raised again in the main thread
                self._error = error

        self._thread = threading.Thread(target=run, name="hvdtrain-checkpoint", daemon=True)
        self._thread.start()
