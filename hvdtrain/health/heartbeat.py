"""Signs of life of the ranks: a heartbeat every few seconds, and which ranks are slow.

A thread of the rank replaces RUN/heartbeats/rank-0000.json at each beat, in large jobs less often.
If the file grows old, the rank is stopped or its host is down.

Ranks that wait for one another take equally long for a step; they differ in the time that they
spend without waiting. To find stragglers, a rank's time is compared with that of the other
replicas of its stages, or, if there are none, with its own best time so far.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from hvdtrain.engine.progress import Vitals
from hvdtrain.errors import DataError
from hvdtrain.host import records
from hvdtrain.host.counters import Meter
from hvdtrain.host.ownership import BEAT_SECONDS, Owner
from hvdtrain.plan.plan import Plan

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


FACTOR = 1.5  # a straggler takes more than this times the expected seconds
SMALLEST_SECONDS = 1e-3  # per step; smaller differences come from other work on the machine
FEWEST_STEPS = 5  # steps of one judgement
TIMES = 2  # judgements in a row before a rank is named


@dataclass(frozen=True)
class Straggler:
    """A rank that takes longer than expected.

    Attributes:
        own_seconds, expected_seconds: median seconds per step, without waiting.
        lost_fraction: part of each step that the job would save if the rank were as fast as
            expected.
    """

    rank: int
    own_seconds: float
    expected_seconds: float
    lost_fraction: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: {1e3 * self.own_seconds:.1f} ms per step without waiting, "
            f"{1e3 * self.expected_seconds:.1f} ms expected; this costs "
            f"{100 * self.lost_fraction:.0f} % of each step"
        )


class Stragglers:
    """Follows the ranks from one window of steps to the next.

    Args:
        groups: all ranks once, those with the same work together.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = [np.array(group) for group in groups]
        size = sum(map(len, groups))
        self.best = np.full(size, np.inf)
        self.slow = np.zeros(size, np.int64)  # judgements in a row
        self.unjudged: list[NDArray[np.float64]] = []

    def look(self, vitals: NDArray[np.float64]) -> list[Straggler]:
        """Take a window [steps, ranks, Vitals]; return the ranks that are stragglers from now on.

        A rank is returned once, and again only after it has recovered.
        """
        if len(self.best) < 2:
            return []
        self.unjudged.append(vitals)
        if sum(map(len, self.unjudged)) < FEWEST_STEPS:
            return []
        seconds, own_seconds = np.median(np.concatenate(self.unjudged), axis=0).T[:2]
        self.unjudged.clear()
        expected = self.best.copy()
        for group in self.groups:
            if len(group) > 1:
                expected[group] = medians_of_others(own_seconds[group])
        self.best = np.minimum(self.best, own_seconds)
        excess = own_seconds - expected
        is_slow = (own_seconds > FACTOR * expected) & (excess > SMALLEST_SECONDS)
        self.slow = np.where(is_slow, self.slow + 1, 0)
        return [
            Straggler(
                rank=int(rank),
                own_seconds=float(own_seconds[rank]),
                expected_seconds=float(expected[rank]),
                lost_fraction=float(min(1.0, excess[rank] / max(seconds[rank], 1e-9))),
            )
            for rank in np.flatnonzero(self.slow == TIMES)
        ]


def medians_of_others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each of two values or more the median of the others; sorts once."""
    places = np.argsort(values, kind="stable")
    ordered, others = values[places], len(values) - 1
    numbers = np.arange(len(values))

    def other(number: int) -> NDArray[np.float64]:
        """Return for each value the one of this number among the others, in order."""
        chosen: NDArray[np.float64] = ordered[number + (numbers <= number)]
        return chosen

    medians = np.empty(len(values))
    medians[places] = (other((others - 1) // 2) + other(others // 2)) / 2
    return medians


def groups_of_equal_work(plan: Plan, size: int) -> list[tuple[int, ...]]:
    """Return all ranks, those with the same stages and the same share of each batch together."""
    works: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(size)}
    for number, stage in enumerate(plan.stages):
        for rank, share in zip(stage.ranks, stage.shares, strict=True):
            works[rank].append((number, share))
    groups: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank, work in works.items():
        groups.setdefault(tuple(work), []).append(rank)
    return [tuple(group) for group in groups.values()]


def as_lists(vitals: NDArray[np.float64]) -> dict[str, list[float | None]]:
    """Return the medians over a window [steps, ranks, Vitals], by rank, for a step line."""
    medians = np.median(vitals, axis=0).T
    return {
        name: [None if np.isnan(value) else round(float(value), 6) for value in values]
        for name, values in zip(Vitals._fields, medians, strict=True)
        if name != "seconds"
    }


SECONDS, OWN, DATA = (Vitals._fields.index(f"{name}seconds") for name in ("", "own_", "data_"))


def own_seconds(vitals: NDArray[np.float64]) -> tuple[tuple[float, ...], float]:
    """Return each rank's own seconds without the wait for data, and the seconds of the step.

    Args:
        vitals: [ranks, fields of Vitals], fp64.
    """
    seconds = np.maximum(vitals[:, OWN] - vitals[:, DATA], 0.0)
    return tuple(seconds.tolist()), float(vitals[:, SECONDS].max())
