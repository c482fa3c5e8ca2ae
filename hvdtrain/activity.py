"""What each rank is doing right now: a line in a small memory-mapped file, and a watchdog.

The file outlives its ranks, so that a launcher can say what a dead one was doing. The watchdog
ends the job if an action takes longer than any should: a message that never comes is an error with
a name, not a hang. The launcher watches the file from outside: a rank may hang where its own
watchdog does not look, or with all its threads.
"""

import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
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
# More that a wait for all ranks may take, where it is not to be taken for what hangs.
AFTER_OTHERS_SECONDS = AFTER_THE_RANKS_SECONDS + 2.0
ENDING_SECONDS = 20.0  # that a watchdog may take to say what it found, and to end the job
WATCH_SECONDS = 0.5  # between two looks from outside
SUSPENDED_TICKS = 3.0  # a longer gap between two looks means that who looks was suspended itself


class Activity:
    """One rank's line of the file, and since when it stands there.

    Args:
        path: the file, made if it is not there. None: no file.
        place: the number of this rank's line in it.
        limit: seconds that an action may take.
        on_stall: called, from another thread, with the line of an action that took longer.
    """

    def __init__(
        self,
        path: Path | None,
        place: int,
        limit: float,
        on_stall: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit, self.on_stall = limit, on_stall
        self.tick = min(limit / _LOOKS, threading.TIMEOUT_MAX)  # seconds between two looks
        self._patience = _Patience(self.tick, clock)
        self._map = _open_map(path, place) if path else None
        self._start = place * RECORD_BYTES
        self._step, self._prefix = 0, ""
        self._line: str | None = None
        self._allowed = limit
        self._noted = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvdtrain-watchdog", daemon=True)
        self._thread.start()

    def step(self, number: int) -> None:
        """The actions to come are those of this step."""
        self._step, self._prefix = number, f"{IN_TRAINING}{number}, "

    def note(self, line: str, factor: float = 1.0, after_others: bool = False) -> None:
        """From now on this rank does what `line` says, for at most `factor` times the limit.

        Args:
            after_others: it waits for ranks that may take as long, and are to be named first.
        """
        self._do(line, self.limit * factor + (AFTER_OTHERS_SECONDS if after_others else 0.0))

    def _do(self, line: str, allowed: float) -> None:
        self._noted += 1  # first: the watchdog reads both
        self._line, self._allowed = line, allowed
        if self._map is not None:
            text = f"{self._prefix}{line}".encode()[:LINE_BYTES].ljust(LINE_BYTES)
            record = _HEAD.pack(self._noted, allowed) + text
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
    def doing(self, line: str, factor: float = 1.0, after_others: bool = False) -> Iterator[None]:
        """Do what `line` says, as `note` has it, and then what was done before, or rest."""
        before, allowed = self._line, self._allowed
        self.note(line, factor, after_others)
        try:
            yield
        finally:
            if before is None:
                self.rest()
            else:
                self._do(before, allowed)

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        self._thread.join()

    def stalled(self) -> str | None:
        """Look, as the watchdog does each `tick`: the line of an action that takes too long."""
        age, line = self._patience.age(self._noted), self._line
        if line is not None and age > self._allowed:
            return f"{self._prefix}{line}"
        return None

    def _watch(self) -> None:
        while not self._closed.wait(self.tick):
            if (line := self.stalled()) is not None:
                self._do(self._line or "", ENDING_SECONDS)
                self.on_stall(line)
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
    """A look from outside at ranks of a job, by their launcher or by the monitor of one.

    Args:
        path: the file in which they note what they do.
        ranks: which of its lines to look at.
        start_limit: seconds that anything may take before the first step.
        tick: seconds between two looks.
    """

    def __init__(
        self,
        path: Path,
        ranks: Iterable[int],
        start_limit: float,
        tick: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.start_limit = path, start_limit
        self._patience = {rank: _Patience(tick, clock) for rank in ranks}

    def stalled(self) -> tuple[int, str] | None:
        """The rank that has been at one thing for longest, if that is too long, and its line."""
        found: list[tuple[float, int, str]] = []
        for rank, patience in self._patience.items():
            count, limit, line = _record(self.path, rank)
            age = patience.age(count)
            allowed = abs(limit)
            if not line.startswith(IN_TRAINING):
                allowed = max(allowed, self.start_limit)
            if age > allowed + AFTER_THE_RANKS_SECONDS:
                own = "its own work after " if line and limit < 0 else ""
                found.append((age, rank, f"{own}{line}" or "its start-up"))
        if not found:
            return None
        _, rank, line = max(found)
        return rank, line


def ended_from_outside(rank: int, line: str) -> str:
    """What is said of a rank of this host with which a job was ended."""
    return (
        f"rank {rank} on {socket.gethostname()} has been stuck for longer than --stall-timeout "
        f"allows, in {line}; the job was ended with it"
    )


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
