"""One rank's part of the checkpoints: copied while training waits, written while it goes on."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from hvdtrain.activity import Activity
from hvdtrain.errors import DataError
from hvdtrain.training.checkpoint import store
from hvdtrain.training.stall import SAVE_FACTOR

# The thread that writes gives way to those that compute (the kernel's nice value).
NICE = 10


class Saver:
    """Writes parts in a thread of its own. Every rank has one; all of them begin together.

    A checkpoint is pending from `begin` to `settle`: its parts are being written, or are written
    and not yet committed. It is open from `begin` until all ranks know what became of it.

    Args:
        activity: of the thread alone: it may hang while training goes on.
    """

    def __init__(self, folder: Path, rank: int, token: str, activity: Activity) -> None:
        self.folder, self.rank, self.token, self.activity = folder, rank, token, activity
        self.pending = self.is_open = False
        self.name = ""
        self._settle: Callable[[], object]
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def written(self) -> bool:
        """Whether this rank's part of the pending checkpoint is on the disk."""
        busy = self._thread is not None and self._thread.is_alive()
        return self.pending and not busy and self._error is None

    @property
    def failed(self) -> bool:
        """Whether the disk did not take what this rank wrote of the open checkpoint."""
        return isinstance(self._error, DataError)

    def begin(
        self,
        name: str,
        copy: Callable[[], dict[str, np.ndarray]],
        settle: Callable[[], object],
        error: DataError | None = None,
    ) -> None:
        """Start to write what `copy` gives as this rank's part of `name`.

        Args:
            copy: copies the tensors, into memory that is not in use once the last part is written.
            settle: what this rank does once all parts are written; rank 0 makes the checkpoint.
            error: what this rank could not write already, for the others to hear of.
        """
        assert not self.is_open, "one checkpoint at a time"
        self.join()
        copies = copy()
        self.name, self._settle = name, settle
        self.pending = self.is_open = True
        self._error = error
        if error is not None:
            return
        self._start(lambda: store.write_part(self.folder, name, self.rank, copies, self.token))

    def settle(self) -> None:
        """All ranks have written their parts: what is left to do is done in the thread."""
        self.join()
        self.pending = False
        self._start(self._settle)

    def end(self) -> None:
        """All ranks know what became of the checkpoint; what is left of a failed one goes."""
        self.join()
        if self.pending or self.failed:
            store.discard(self.folder, self.name, self.rank, self.token)
        self.pending = self.is_open = False
        self._error = None

    @property
    def fault(self) -> str:
        """What the disk did not take, in words; empty if it took all."""
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
        """Raise what went wrong in the thread, but for a failure of the disk: that may pass.

        Raises:
            UsageError: if the run folder is no longer this run's.
        """
        if self._error is not None and not self.failed:
            error, self._error = self._error, None
            raise error

    def _start(self, work: Callable[[], object]) -> None:
        def run() -> None:
            if sys.platform == "linux":  # elsewhere a thread has no priority of its own
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            try:
                with self.activity.doing(f"writing {self.name}", SAVE_FACTOR):
                    work()
            except BaseException as error:  # raised again in the main thread
                self._error = error

        self._thread = threading.Thread(target=run, name="hvdtrain-checkpoint", daemon=True)
        self._thread.start()
