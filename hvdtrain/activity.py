"""What each rank is doing right now: a line in a small memory-mapped file, and a watchdog.

The file outlives its ranks, so that a launcher can say what a dead one was doing. The watchdog
ends the job if an action takes longer than any should: a message that never comes is an error with
a name, not a hang.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LINE_BYTES = 160
_LOOKS = 20  # of the watchdog, in the time it allows


class Activity:
    """One rank's line of the file, and since when it stands there.

    Args:
        path: the file, the same for all ranks of a host; made if it is not there. None: no file.
        rank: the number of this rank's line.
        limit: seconds that an action may take.
        on_stall: called, from another thread, with the line of an action that took longer.
    """

    def __init__(
        self, path: Path | None, rank: int, limit: float, on_stall: Callable[[str], None]
    ) -> None:
        self.limit, self.on_stall = limit, on_stall
        self._map = _open_map(path, rank) if path else None
        self._start = rank * LINE_BYTES
        self._step, self._prefix = 0, ""
        self._line: str | None = None
        self._since = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvdtrain-watchdog", daemon=True)
        self._thread.start()

    def step(self, number: int) -> None:
        """The actions to come are those of this step."""
        self._step, self._prefix = number, f"step {number}, "

    def note(self, line: str) -> None:
        """From now on this rank does what `line` says."""
        self._since = time.monotonic()  # first: the watchdog reads both
        self._line = line
        if self._map is not None:
            text = f"{self._prefix}{line}".encode()[:LINE_BYTES].ljust(LINE_BYTES)
            self._map[self._start : self._start + LINE_BYTES] = text

    def now(self) -> tuple[int, str]:
        """The step, and what is done in it; empty at rest."""
        return self._step, self._line or ""

    def rest(self) -> None:
        """This rank does something of its own, for as long as it takes."""
        self._line = None

    @contextmanager
    def doing(self, line: str) -> Iterator[None]:
        """Do what `line` says, and then rest."""
        self.note(line)
        try:
            yield
        finally:
            self.rest()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(min(self.limit / _LOOKS, threading.TIMEOUT_MAX)):
            line = self._line
            if line is not None and time.monotonic() - self._since > self.limit:
                self.on_stall(f"{self._prefix}{line}")
                return


def last_activity(path: Path, rank: int) -> str:
    """What `rank` was doing last; empty if that is not known."""
    try:
        with path.open("rb") as file:
            file.seek(rank * LINE_BYTES)
            return file.read(LINE_BYTES).rstrip(b" \0").decode(errors="replace")
    except OSError:
        return ""


def _open_map(path: Path, rank: int) -> mmap.mmap:
    with path.open("ab"):
        pass
    with path.open("r+b") as file:
        # Ranks come in any order: to write one's own line can only make the file longer.
        os.pwrite(file.fileno(), b" " * LINE_BYTES, rank * LINE_BYTES)
        return mmap.mmap(file.fileno(), (rank + 1) * LINE_BYTES)
