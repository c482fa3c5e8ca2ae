"""What each rank is doing right now: a line in a small memory-mapped file, and a watchdog.

The file outlives its ranks, so that a launcher can say what a dead one was doing. The watchdog
ends the job if an action takes longer than any should: a message that never comes is an error with
a name, not a hang. The launcher watches the file from outside: a rank may hang where its own
watchdog does not look, or with all its threads.
"""

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LINE_BYTES = 160
# How often a rank has noted something, and the seconds that are allowed for what it does: negative
# where that is its own work after what the line says.
_HEAD = struct.Struct("<Qd")
RECORD_BYTES = _HEAD.size + LINE_BYTES
IN_TRAINING = "step "  # what lines begin with from the first step on
_LOOKS = 20  # of the watchdog, in the time it allows
# Beside the limit: a rank's own watchdog comes first, since it can say whom the rank waits for.
AFTER_THE_RANKS_SECONDS = 6.0
SUSPENDED_TICKS = 3.0  # a longer gap between two looks means that who looks was suspended itself


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
        self._start = rank * RECORD_BYTES
        self._step, self._prefix = 0, ""
        self._line: str | None = None
        self._factor = 1.0
        self._noted = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvdtrain-watchdog", daemon=True)
        self._thread.start()

    def step(self, number: int) -> None:
        """The actions to come are those of this step."""
        self._step, self._prefix = number, f"{IN_TRAINING}{number}, "

    def note(self, line: str, factor: float = 1.0) -> None:
        """From now on this rank does what `line` says, for at most `factor` times the limit."""
        self._noted += 1  # first: the watchdog reads both
        self._line, self._factor = line, factor
        if self._map is not None:
            text = f"{self._prefix}{line}".encode()[:LINE_BYTES].ljust(LINE_BYTES)
            record = _HEAD.pack(self._noted, self.limit * factor) + text
            self._map[self._start : self._start + RECORD_BYTES] = record

    def now(self) -> tuple[int, str]:
        """The step, and what is done in it; empty at rest."""
        return self._step, self._line or ""

    def rest(self) -> None:
        """This rank does something of its own, which the launcher alone watches."""
        self._line = None
        self._noted += 1
        if self._map is not None:
            _HEAD.pack_into(self._map, self._start, self._noted, -self.limit)

    @contextmanager
    def doing(self, line: str, factor: float = 1.0) -> Iterator[None]:
        """Do what `line` says, for at most `factor` times the limit, and then rest."""
        self.note(line, factor)
        try:
            yield
        finally:
            self.rest()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        tick = min(self.limit / _LOOKS, threading.TIMEOUT_MAX)
        patience = _Patience(tick)
        while not self._closed.wait(tick):
            age, line = patience.age(self._noted), self._line
            if line is not None and age > self.limit * self._factor:
                self.on_stall(f"{self._prefix}{line}")
                return


class _Patience:
    """For how long a count has been the same, by a clock that stops while this process does.

    A suspended job (SIGSTOP, `scontrol suspend`) is not a stalled one.
    """

    def __init__(self, tick: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.tick, self.clock = tick, clock
        self._count, self._age, self._last = -1, 0.0, clock()

    def age(self, count: int) -> float:
        """Seconds since the count became what it is, at most one look late."""
        now = self.clock()
        gap, self._last = now - self._last, now
        if count != self._count:
            self._count, self._age = count, 0.0
        else:
            self._age += min(gap, SUSPENDED_TICKS * self.tick)
        return self._age


class Watch:
    """The launcher's look at the ranks of a job.

    Args:
        path: the file in which they note what they do.
        start_limit: seconds that anything may take before the first step.
        tick: seconds between two looks.
    """

    def __init__(
        self,
        path: Path,
        ranks: int,
        start_limit: float,
        tick: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.start_limit = path, start_limit
        self._patience = [_Patience(tick, clock) for _ in range(ranks)]

    def stalled(self) -> tuple[int, str] | None:
        """The rank that has been at one thing for longest, if that is too long, and its line."""
        found: list[tuple[float, int, str]] = []
        for rank, patience in enumerate(self._patience):
            count, limit, line = _record(self.path, rank)
            age = patience.age(count)
            allowed = abs(limit) if line.startswith(IN_TRAINING) else self.start_limit
            if age > allowed + AFTER_THE_RANKS_SECONDS:
                own = "its own work after " if line and limit < 0 else ""
                found.append((age, rank, f"{own}{line}" or "its start-up"))
        if not found:
            return None
        _, rank, line = max(found)
        return rank, line


def last_activity(path: Path, rank: int) -> str:
    """What `rank` was doing last; empty if that is not known."""
    return _record(path, rank)[2]


def _record(path: Path, rank: int) -> tuple[int, float, str]:
    """How often a rank has noted what it does, the seconds allowed for it, and the line."""
    try:
        with path.open("rb") as file:
            file.seek(rank * RECORD_BYTES)
            content = file.read(RECORD_BYTES)
    except OSError:
        content = b""
    if len(content) < RECORD_BYTES:
        return 0, 0.0, ""
    count, limit = _HEAD.unpack_from(content)
    return count, limit, content[_HEAD.size :].rstrip(b" \0").decode(errors="replace")


def _open_map(path: Path, rank: int) -> mmap.mmap:
    with path.open("ab"):
        pass
    with path.open("r+b") as file:
        # Ranks come in any order: to write one's own line can only make the file longer.
        os.pwrite(file.fileno(), _HEAD.pack(0, 0.0) + b" " * LINE_BYTES, rank * RECORD_BYTES)
        return mmap.mmap(file.fileno(), (rank + 1) * RECORD_BYTES)
