"""The current action of each rank, as a line in a small memory-mapped file, and a watchdog.

The file outlives its ranks, so that a launcher can report what a dead rank was doing. The watchdog
ends the job if an action exceeds its time limit: a message that never arrives becomes an error
that names the action, not a hang. The launcher also watches the file from outside, because a rank
may hang where its own watchdog does not look, or with all its threads.
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
# The number of times a rank has written its line, and the seconds allowed for its current action.
# The seconds are negative while it does its own work after the action that the line names.
_HEAD = struct.Struct("<Qd")
RECORD_BYTES = _HEAD.size + LINE_BYTES
IN_TRAINING = "step "  # prefix of the lines from the first step on
_LOOKS = 20  # checks by the watchdog within the time limit of an action
# The launcher allows this much more than the limit. The rank's own watchdog must act first, since
# it can report which rank is waited for.
AFTER_THE_RANKS_SECONDS = 6.0
# Extra time for a wait for all ranks, so that the wait is not reported instead of the hung action.
AFTER_OTHERS_SECONDS = AFTER_THE_RANKS_SECONDS + 2.0
ENDING_SECONDS = 20.0  # time that a watchdog may take to report the hang and to end the job
WATCH_SECONDS = 0.5  # time between two checks from outside
# Loading libraries, and reading and writing checkpoints, takes longer on disks that are shared.
START_FACTOR, SAVE_FACTOR = 5.0, 5.0
OTHERS_SAVE_FACTOR = 6.0  # for ranks that wait: the slow rank reaches its limit first
SUSPENDED_TICKS = 3.0  # after a longer gap between two checks, the checker itself was suspended


class Activity:
    """One rank's line in the file, and the time since it last changed.

    Args:
        path: the file, created if it does not exist. None: no file.
        place: the index of this rank's line in the file.
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
        self.tick = min(limit / _LOOKS, threading.TIMEOUT_MAX)  # seconds between checks
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
        """Assign the following actions to step `number`."""
        self._step, self._prefix = number, f"{IN_TRAINING}{number}, "
        if self._line is None:  # otherwise the last action would be shown, of the step before
            self.note("starting")
            self.rest()

    def note(self, line: str, factor: float = 1.0, after_others: bool = False) -> None:
        """Record `line` as the current action, which may take `factor` times the limit.

        Args:
            after_others: allow extra time, because the action waits for ranks that may take the
                full limit themselves and must be reported first.
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
        """Return the step and the current action, which is empty at rest."""
        return self._step, self._line or ""

    def rest(self) -> None:
        """Mark this rank as doing its own work, which only the launcher watches."""
        self._line = None
        self._noted += 1
        if self._map is not None:
            _HEAD.pack_into(self._map, self._start, self._noted, -self.limit)

    @contextmanager
    def doing(self, line: str, factor: float = 1.0, after_others: bool = False) -> Iterator[None]:
        """Record `line` as `note` does inside the block, and restore the previous state after."""
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
        """Stop the watchdog."""
        self._closed.set()
        self._thread.join()

    def stalled(self) -> str | None:
        """Return the line of an action that takes too long; the watchdog checks every `tick`."""
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
    """The time for which a count has not changed, by a clock that stops while this process does.

    A suspended job (SIGSTOP, `scontrol suspend`) is not a stalled one.
    """

    def __init__(self, tick: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.tick, self.clock = tick, clock
        self._count, self._age, self._last = -1, 0.0, clock()

    def age(self, count: int) -> float:
        """Return the seconds since the count last changed, at most one check late."""
        now = self.clock()
        gap, self._last = now - self._last, now
        if count != self._count:
            self._count, self._age = count, 0.0
        else:
            self._age += min(gap, SUSPENDED_TICKS * self.tick)
        return self._age


class Watch:
    """A check of a job's ranks from outside, by their launcher or by the monitor of one rank.

    Args:
        path: the file in which the ranks record their actions.
        ranks: indices of the lines to check.
        start_limit: seconds that any action may take before the first step.
        tick: seconds between two checks.
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
        """Return the rank that has been stuck for longest, and its line; None if no rank is."""
        stuck: list[tuple[float, int, str]] = []
        for rank, patience in self._patience.items():
            count, limit, line = _record(self.path, rank)
            age = patience.age(count)
            allowed = abs(limit)
            if not line.startswith(IN_TRAINING):
                allowed = max(allowed, self.start_limit)
            if age > allowed + AFTER_THE_RANKS_SECONDS:
                prefix = "its own work after " if line and limit < 0 else ""
                stuck.append((age, rank, f"{prefix}{line}" or "its start-up"))
        if not stuck:
            return None
        _, rank, line = max(stuck)
        return rank, line


def stuck(rank: int, line: str) -> str:
    """Return the start of a message about a rank of this host that takes too long."""
    host = socket.gethostname()
    return (
        f"rank {rank} on {host} has been stuck for longer than --stall-timeout allows, in {line}"
    )


def stuck_message(rank: int, line: str) -> str:
    """Return the message about a stuck rank of this host whose job was ended."""
    return f"{stuck(rank, line)}; the job was ended with it"


def last_activity(path: Path, rank: int) -> str:
    """Return the last action of `rank`, empty if it is not known."""
    return _record(path, rank)[2]


def _record(path: Path, rank: int) -> tuple[int, float, str]:
    """Return how many times a rank has written its line, the seconds allowed, and the line."""
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
        # Ranks start in any order: writing a line can only extend the file.
        os.pwrite(file.fileno(), _HEAD.pack(0, 0.0) + b" " * LINE_BYTES, rank * RECORD_BYTES)
        return mmap.mmap(file.fileno(), (rank + 1) * RECORD_BYTES)
