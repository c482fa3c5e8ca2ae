"""One rank's checkpoint files: copied while training waits, written while it continues."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.checkpoint import store
from hvdtrain.errors import DataError
from hvdtrain.host.activity import SAVE_FACTOR, Activity

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
        self._start(
            name, lambda: store.write_part(self.folder, name, self.rank, copies, self.token)
        )

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
            store.discard(self.folder, self._open.name, self.rank, self.token)
        self._open = self._error = None

    def withdraw(self) -> None:
        """Remove this rank's files of the open checkpoint, in a folder that is another run's."""
        if self._thread is not None:
            self._thread.join(WITHDRAWAL_SECONDS)
        if self._open is not None:
            store.discard(self.folder, self._open.name, self.rank, self.token)

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
