"""Counters of a host: the energy of a run, and what else used the cores of its ranks.

Processors: RAPL by the powercap tree of Linux (Documentation/power/powercap), which holds those
of AMD, too. They count whole packages: other jobs on a shared host are included. GPUs: the total
energy of all GPUs that NVML shows this job. Slurm: what its plugin (AcctGatherEnergyType) counts
for the step that started the ranks, on all of its hosts. Nothing is estimated: what cannot be read
is named.

Other processes, heat and a hypervisor: /proc/stat (proc(5)), the thermal counters of the
processor, and the limit of a control group (cpu.stat). Of these, a counter that a system lacks
counts as zero.
"""

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.host.process import usable_cores

POWERCAP = Path("/sys/class/powercap")
RAPL, NVML, SLURM = "RAPL", "NVML", "Slurm"
ANSWER_SECONDS = 10.0  # that Slurm gets for an answer


@dataclass
class Counter:
    """A counter of energy that starts again at zero after it has reached its largest value.

    Attributes:
        read: returns its value in joules.
        largest: the value after which it starts again; infinite if it does not.
        last: the value at the last sample.
        joules: the energy since the first one.
    """

    read: Callable[[], float]
    largest: float
    last: float
    joules: float = 0.0

    def sample(self) -> None:
        """Add the energy since the last sample; the counter may have started again once.

        Raises:
            RuntimeError: if it should not have.
        """
        now = self.read()
        if now < self.last and self.largest == float("inf"):
            raise RuntimeError("the counter fell")
        self.joules += now - self.last + (self.largest if now < self.last else 0.0)
        self.last = now


class Meter:
    """Counters of one host, which a single rank of the host samples.

    Attributes:
        counters: by source and the name of the part.
        distant: like `counters`, of those that a service answers for: read at both ends only.
        missing: what could not be read, and why.
    """

    def __init__(self) -> None:
        self.counters: dict[tuple[str, str], Counter] = {}
        self.distant: dict[tuple[str, str], Counter] = {}
        self.missing: list[str] = []
        self.started = time.monotonic()
        self._lock = threading.Lock()  # a thread samples, and the main thread reads

    def sample(self) -> None:
        """Read the host's counters; needed before they start again, which takes minutes."""
        with self._lock:
            self._read(self.counters)

    def ask(self) -> None:
        """Read the distant counters, which may take seconds; only the main thread does."""
        self._read(self.distant)

    def _read(self, counters: dict[tuple[str, str], Counter]) -> None:
        for key, counter in list(counters.items()):
            try:
                counter.sample()
            except Exception as error:  # a counter must not end a run
                del counters[key]
                self.missing.append(f"{' '.join(key)}: {error}")

    def restart(self) -> None:
        """Count from now on; distant counters count from when they were asked last."""
        self.sample()
        with self._lock:
            self.started = time.monotonic()
            for counter in (*self.counters.values(), *self.distant.values()):
                counter.joules = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return joules by source and part since the start, and what is missing."""
        self.ask()
        self.sample()
        joules: dict[str, dict[str, float]] = {}
        with self._lock:
            for (source, part), counter in (*self.counters.items(), *self.distant.items()):
                joules.setdefault(source, {})[part] = round(counter.joules, 3)
            seconds = round(time.monotonic() - self.started, 3)
            return {"seconds": seconds, "joules": joules, "missing": list(self.missing)}


def open_meter(has_gpus: bool, step: str | None = None) -> Meter:
    """Return a meter of this host that starts now.

    Args:
        has_gpus: whether the run uses the GPUs, so that their energy counts.
        step: the step of Slurm that started the ranks, whose energy on all hosts counts.
    """
    meter = Meter()
    _open_rapl(meter)
    if has_gpus:
        _open_nvml(meter)
    if step is not None:
        _open_slurm(meter, step)
    return meter


def _open_rapl(meter: Meter) -> None:
    """Add the packages and the memory beside them: no zone that another one contains."""
    zones = sorted(POWERCAP.glob("intel-rapl:*")) if POWERCAP.is_dir() else []
    if not zones:
        meter.missing.append("RAPL: this system has no counters of its processors' energy")
    for zone in zones:
        try:
            name = (zone / "name").read_text().strip()
            if not name.startswith(("package", "dram")):
                continue
            path = zone / "energy_uj"
            largest = int((zone / "max_energy_range_uj").read_text()) / 1e6
            read = partial(_joules, path)
            part = name if name.startswith("package") else f"{name} {zone.name.split(':')[1]}"
            meter.counters[RAPL, part] = Counter(read, largest, read())
        except PermissionError:
            meter.missing.append(f"RAPL: no permission to read {zone / 'energy_uj'}")
        except (OSError, ValueError) as error:
            meter.missing.append(f"RAPL: {zone} cannot be read: {error}")


def _joules(path: Path) -> float:
    return int(path.read_text()) / 1e6


def _open_nvml(meter: Meter) -> None:
    """Add all GPUs that the host shows to this job."""
    try:
        import pynvml

        def read(handle: Any) -> float:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

        pynvml.nvmlInit()
        for place in range(pynvml.nvmlDeviceGetCount()):
            one = partial(read, pynvml.nvmlDeviceGetHandleByIndex(place))
            meter.counters[NVML, f"GPU {place}"] = Counter(one, float("inf"), one())
    except Exception as error:  # without its library NVML has no exceptions of its own
        meter.missing.append(f"NVML: {error}")


def _open_slurm(meter: Meter, step: str) -> None:
    """Add what Slurm counts for a step, if it counts energy."""
    command = f"sstat --noheader --parsable2 --format ConsumedEnergyRaw --jobs {step}".split()

    def read() -> float:
        answer = _answer(*command).strip()
        if not answer.isdigit():
            raise RuntimeError(f"sstat shows no energy of step {step}")
        return float(answer)

    try:
        configuration = _answer("scontrol", "show", "config")
        plugin = re.search(r"AcctGatherEnergyType[ \t]*=[ \t]*(\S+)", configuration)
        if plugin is None or plugin[1] in ("(null)", "acct_gather_energy/none"):
            raise RuntimeError("it counts no energy on this cluster (AcctGatherEnergyType)")
        meter.distant[SLURM, f"step {step}"] = Counter(read, float("inf"), read())
    except Exception as error:  # an answer must not end a run
        meter.missing.append(f"{SLURM}: {error}")


def _answer(*command: str) -> str:
    """Return what a command of Slurm prints.

    Raises:
        RuntimeError: if it cannot be run, fails, or takes too long.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS
        )
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} took more than {ANSWER_SECONDS:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(f"{command[0]} failed: {lines[-1] if lines else 'without a message'}")
    return done.stdout


STAT = Path("/proc/stat")
PROCESSORS = Path("/sys/devices/system/cpu")
GROUPS = Path("/sys/fs/cgroup")
MOST_SHARED = 0.05  # of the cores
CROWDED = 1.5  # load average, in processes per core
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


def read_load() -> Load:
    """Read the counters of this process and its cores."""
    cores = usable_cores()
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


def crowd() -> str:
    """Return that more processes want to run on this host than it has cores, or nothing.

    By the load average of the last minute, as `uptime` shows it, which includes the ranks.
    """
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < CROWDED * cores:
        return ""
    return f" ({load:.1f} processes compete for the {cores} core(s) of rank 0's host: see top)"


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
