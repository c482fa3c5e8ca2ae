"""Heartbeat of each rank every few seconds, for readers outside of the run.

A thread of the rank replaces RUN/heartbeats/rank-0000.json at each beat, in large jobs less often.
If the file grows old, the rank is stopped or its host is down.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdtrain.errors import DataError
from hvdtrain.host import records
from hvdtrain.host.counters import Meter
from hvdtrain.host.ownership import BEAT_SECONDS, Owner

SILENT_BEATS = 4  # a rank is silent after 4 missing beats
MOST_BEATS = 100.0  # of all ranks per second: each is a few operations of a shared file system


class Heartbeat:
    """Beats from its construction to `close`, and measures what takes too long within a step.

    Args:
        folder: the folder of all ranks' files, which exists.
        size: number of ranks.
        memory_bytes: returns the bytes that this rank has allocated.
        doing: returns the step of this rank and its current action.
        owner: the owner of the run folder; rank 0 checks at each beat that it still is.
        meter: the energy of this host, sampled at each beat; None on all but one rank of a host.

    Attributes:
        memory_bytes, load: as in `Vitals`, at the last beat.
        is_replaced: whether the run folder belonged to another run at the last beat.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        memory_bytes: Callable[[], float],
        doing: Callable[[], tuple[int, str]],
        owner: Owner,
        meter: Meter | None = None,
    ) -> None:
        self.path = file_of(folder, rank)
        self.rank, self.doing, self.owner, self.meter = rank, doing, owner, meter
        self.is_replaced = False
        self._seconds = BEAT_SECONDS if rank == 0 else beat_seconds(size)  # rank 0 shows the owner
        self._measure_memory = memory_bytes
        self.memory_bytes, self.load = 0.0, 0.0
        self._closed = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="hvdtrain-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after one last beat."""
        self._closed.set()
        self._thread.join()

    def give_up(self) -> None:
        """Stop without another beat, and release the run folder."""
        self._closed.set()
        if self.rank == 0:
            self.owner.release()

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            self._beat()
            if self.meter is not None:
                self.meter.sample()
        self._beat()

    def _beat(self) -> None:
        if self.rank == 0:  # a network file system may show the file late to other ranks
            with suppress(DataError):  # the disk may answer at the next beat
                self.is_replaced = not self.owner.holds()
        self.load = os.getloadavg()[0]
        self.memory_bytes = self._measure_memory()
        step, action = self.doing()
        content = {
            "time": round(time.time(), 3),
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": step,
            "doing": action,
            "memory_bytes": int(self.memory_bytes),
            "host_memory_available_bytes": psutil.virtual_memory().available,
            "load": self.load,
        }
        if self.is_replaced:
            return  # the file belongs to another run now
        temporary = self.path.with_name(f".{self.path.name}.{self.owner.token}")
        with suppress(OSError):  # checkpoints report a full disk
            temporary.write_text(json.dumps(content) + "\n")
            temporary.replace(self.path)


def beat_seconds(size: int) -> float:
    """Return the seconds between two beats of each of `size` ranks."""
    return max(BEAT_SECONDS, size / MOST_BEATS)


def file_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeat file."""
    return folder / f"rank-{rank:04d}.json"


@dataclass(frozen=True)
class Beat:
    """The heartbeat of a rank."""

    time: float
    pid: int
    host: str = ""
    step: int | None = None
    doing: str = ""


def read(path: Path) -> Beat | None:
    """Return the last heartbeat of a rank, or None if it cannot be read."""
    with suppress(DataError):
        return records.read(path, Beat)
    return None


def suspects(folder: Path, size: int, rank: int, own_work: Collection[str]) -> list[str]:
    """Return a line for each rank that `rank` may be waiting for.

    Args:
        own_work: actions of ranks that do not wait for another rank.
    """
    beats = {rank: read(file_of(folder, rank)) for rank in range(size)}
    return _silent(folder, beats, SILENT_BEATS * beat_seconds(size)) or [
        f"rank {other} on {beat.host} is {beat.doing or 'at its own work'} (step {beat.step})"
        for other, beat in beats.items()
        if beat is not None and other != rank and beat.doing in own_work
    ]


def _silent(folder: Path, beats: Mapping[int, Beat | None], seconds: float) -> list[str]:
    """Return a line for each rank whose last heartbeat is that much older than another one."""
    # By the disk's clock: the clocks of the hosts may differ.
    held = {rank: beat for rank, beat in beats.items() if beat is not None}
    seen = {rank: file_of(folder, rank).stat().st_mtime for rank in held}
    newest = max(seen.values(), default=0.0)
    return [
        f"rank {rank} on {held[rank].host} has sent no heartbeat for "
        f"{newest - time:.0f} s (step {held[rank].step}): is it stopped, or its host down?"
        for rank, time in seen.items()
        if newest - time > seconds
    ]
