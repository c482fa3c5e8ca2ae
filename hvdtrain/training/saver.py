"""One rank's part of the checkpoints: copied while training waits, written while it goes on."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from hvdtrain.training.checkpoint import store

# The thread that writes gives way to those that compute (the kernel's nice value).
NICE = 10


class Saver:
    """Writes parts in a thread of its own. Every rank has one; all of them begin together.

    A checkpoint is pending from `begin` to `settle`: its parts are being written, or are written
    and not yet committed.
    """

    def __init__(self, folder: Path, rank: int, token: str) -> None:
        self.folder, self.rank, self.token = folder, rank, token
        self.pending = False
        self._settle: Callable[[], object]
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def written(self) -> bool:
        """Whether this rank's part of the pending checkpoint is on the disk."""
        busy = self._thread is not None and self._thread.is_alive()
        return self.pending and not busy and self._error is None

    def begin(
        self, name: str, copy: Callable[[], dict[str, np.ndarray]], settle: Callable[[], object]
    ) -> None:
        """Start to write what `copy` gives as this rank's part of `name`.

        Args:
            copy: copies the tensors, into memory that is not in use once the last part is written.
            settle: what this rank does once all parts are written; rank 0 makes the checkpoint.
        """
        assert not self.pending, "one checkpoint at a time"
        self.join()
        copies = copy()
        self.pending, self._settle = True, settle
        self._start(lambda: store.write_part(self.folder, name, self.rank, copies, self.token))

    def settle(self) -> None:
        """All ranks have written their parts: what is left to do is done in the thread."""
        self.join()
        self.pending = False
        self._start(self._settle)

    def join(self) -> None:
        """Return once the thread has nothing to do.

        Raises:
            DataError: if it could not write.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what went wrong in the thread.

        Raises:
            DataError: if it could not write.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _start(self, work: Callable[[], object]) -> None:
        def run() -> None:
            if sys.platform == "linux":  # elsewhere a thread has no priority of its own
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            try:
                work()
            except BaseException as error:  # raised again in the main thread
                self._error = error

        self._thread = threading.Thread(target=run, name="hvdtrain-checkpoint", daemon=True)
        self._thread.start()
