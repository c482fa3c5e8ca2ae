"""Energy of a host's processors and GPUs, from the counters that they have.

Processors: RAPL by the powercap tree of Linux (Documentation/power/powercap), which holds those
of AMD, too. They count whole packages: other jobs on a shared host are included. GPUs: the total
energy of all GPUs that NVML shows this job. Slurm: what its plugin (AcctGatherEnergyType) counts
for the step that started the ranks, on all of its hosts. Nothing is estimated: what cannot be read
is named.
"""

import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
