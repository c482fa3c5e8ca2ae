"""Counters of what else used the cores of a rank: other processes, heat, a hypervisor.

Read from /proc/stat (proc(5)), the thermal counters of the processor, and the limit of a control
group (cpu.stat). A counter that a system does not have counts as zero.
"""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
PROCESSORS = Path("/sys/devices/system/cpu")
GROUPS = Path("/sys/fs/cgroup")
MOST_SHARED = 0.05  # of the cores
MOST_THROTTLED = 0.02  # of the time
# Columns of a line of /proc/stat: user, nice, system, irq and softirq; and stolen.
_BUSY, _STOLEN = (0, 1, 2, 5, 6), 7


@dataclass(frozen=True)
class Load:
    """Counters of a rank and of the cores that it may use, in seconds.

    Attributes:
        elapsed: by the clock.
        used: time on a core of this process and its ended children.
        busy: time that anything ran, by core.
        stolen: time that a hypervisor took, by core.
        throttled: time that a core was slowed down by heat, by core; key -1: time that the limit
            of a control group stopped its processes, per core.
    """

    elapsed: float
    used: float
    busy: dict[int, float]
    stolen: dict[int, float]
    throttled: dict[int, float]

    def since(self, before: "Load") -> "Load":
        """Return what was counted after `before`."""
        return Load(
            self.elapsed - before.elapsed,
            self.used - before.used,
            _less(self.busy, before.busy),
            _less(self.stolen, before.stolen),
            _less(self.throttled, before.throttled),
        )


@dataclass(frozen=True)
class Disturbance:
    """The parts of the cores that the ranks of a host did not get.

    Attributes:
        cores: number of cores that the ranks may use.
        other_cores: how many of them other processes used, mean over the time.
        stolen_cores: cores that a hypervisor took.
        throttled_fraction: part of the time for which the slowest core was slowed down.
    """

    cores: int
    other_cores: float
    stolen_cores: float
    throttled_fraction: float

    @property
    def is_large(self) -> bool:
        """Return whether it is more than what the system does beside any run."""
        stolen = self.other_cores + self.stolen_cores
        return stolen > MOST_SHARED * self.cores or self.throttled_fraction > MOST_THROTTLED


def read() -> Load:
    """Read the counters of this process and its cores."""
    cores = os.sched_getaffinity(0)
    times = os.times()
    busy, stolen = _stat(cores)
    throttled = {core: _thermal(core) for core in cores}
    throttled[-1] = _group_limit() / max(len(cores), 1)
    used = times.user + times.system + times.children_user + times.children_system
    return Load(time.monotonic(), used, busy, stolen, throttled)


def disturbance(loads: Iterable[Load]) -> Disturbance:
    """Return what the ranks of one host shared their cores with, from what each has counted."""
    ranks = list(loads)
    busy = {core: seconds for load in ranks for core, seconds in load.busy.items()}
    stolen = {core: seconds for load in ranks for core, seconds in load.stolen.items()}
    throttled = [seconds for load in ranks for seconds in load.throttled.values()]
    elapsed = max(max(load.elapsed for load in ranks), 1e-9)
    others = sum(busy.values()) - sum(load.used for load in ranks)
    return Disturbance(
        cores=len(busy),
        other_cores=max(others, 0.0) / elapsed,
        stolen_cores=sum(stolen.values()) / elapsed,
        throttled_fraction=min(max(throttled, default=0.0) / elapsed, 1.0),
    )


def _stat(cores: set[int]) -> tuple[dict[int, float], dict[int, float]]:
    """Return the seconds that anything ran and that a hypervisor took, by core."""
    tick = 1 / os.sysconf("SC_CLK_TCK")
    busy, stolen = {}, {}
    with suppress(OSError, ValueError, IndexError):
        for line in STAT.read_text().splitlines():
            name, *columns = line.split()
            if not name.startswith("cpu") or name == "cpu" or (core := int(name[3:])) not in cores:
                continue
            ticks = list(map(int, columns))
            # Guests are counted in user and nice, too.
            busy[core] = tick * sum(ticks[i] for i in _BUSY)
            stolen[core] = tick * ticks[_STOLEN]
    return busy, stolen


def _thermal(core: int) -> float:
    """Return the seconds for which a core was slowed down by heat."""
    with suppress(OSError, ValueError):
        path = PROCESSORS / f"cpu{core}" / "thermal_throttle" / "core_throttle_total_time_ms"
        return int(path.read_text()) / 1e3
    return 0.0


def _group_limit() -> float:
    """Return the seconds of all cores for which a limit of a control group stopped its processes.

    The limit may be that of any group that contains this process.
    """
    seconds = [0.0]
    with suppress(OSError):
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        for folder in (Path(group), *Path(group).parents):
            with suppress(OSError, ValueError):
                text = (GROUPS / folder / "cpu.stat").read_text()
                values = dict(line.split() for line in text.splitlines())
                seconds.append(int(values.get("throttled_usec", 0)) / 1e6)
    return max(seconds)


def _less(now: dict[int, float], before: dict[int, float]) -> dict[int, float]:
    return {key: max(value - before[key], 0.0) for key, value in now.items() if key in before}
