"""The content of `metrics.jsonl` and `summary.json`, as far as other commands read it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.host import records
from hvdtrain.host.counters import Disturbance

METRICS, SUMMARY = "metrics.jsonl", "summary.json"
READ = ("step", "epoch", "plan", "fault")  # the events whose values commands read


@dataclass(frozen=True)
class Stage:
    """A stage of a recorded plan."""

    ranks: tuple[int, ...]
    components: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """A recorded plan."""

    stages: tuple[Stage, ...]

    @property
    def ranks(self) -> set[int]:
        """The ranks that it uses."""
        return {rank for stage in self.stages for rank in stage.ranks}


@dataclass(frozen=True)
class RankSeconds:
    """Seconds of a step by rank."""

    own_seconds: tuple[float | None, ...]
    data_seconds: tuple[float | None, ...]


@dataclass(frozen=True)
class Line:
    """A line of `metrics.jsonl`; it has only some of these keys, and of other events only two."""

    event: str
    time: float = 0.0
    step: int | None = None
    epoch: int | None = None
    seconds: float | None = None
    images_per_second: float | None = None
    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None
    ranks: RankSeconds | None = None
    stages: tuple[Stage, ...] = ()
    devices_a_rank: int = 1
    predicted_seconds: float | None = None
    decision: str | None = None
    message: str = ""


@dataclass(frozen=True)
class Communication:
    """Parts of the steps' seconds."""

    exposed_fraction: float


@dataclass(frozen=True)
class Final:
    """The results of the last epoch."""

    test_accuracy: float | None
    val_accuracy: float | None = None


@dataclass(frozen=True)
class HostDisturbance(Disturbance):
    """The parts of a host that its ranks did not get."""

    host: str


@dataclass(frozen=True)
class HostEnergy:
    """Joules of a host by source and part, and what could not be counted."""

    seconds: float
    joules: dict[str, dict[str, float]]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Emulated:
    """Seconds per step of an emulated run."""

    step_seconds: float
    overhead_seconds_per_step: float
    dilation: float


@dataclass(frozen=True)
class Summary:
    """The content of `summary.json`; fields with a default are not in those of all versions."""

    model: str
    plan: Layout
    ranks: int
    samples: int
    seconds: float
    startup_seconds: float
    train_seconds: float
    images_per_second: float
    communication: Communication
    bubble_fraction: float
    peak_memory_bytes: tuple[float, ...]
    final: Final
    versions: dict[str, str]
    machine: dict[str, str | int | float | None] = field(default_factory=dict)
    devices_a_rank: int = 1
    evaluation_seconds: float | None = None
    agreement: dict[str, float | str | bool | None] = field(default_factory=dict)
    disturbance: tuple[HostDisturbance, ...] = ()
    energy: tuple[HostEnergy, ...] = ()
    emulated: Emulated | None = None


def read_lines(run: Path, last: int | None = None) -> list[Line]:
    """Return the lines in the metrics of a run, or in their `last` bytes; raise DataError."""
    return records.read_lines(run / METRICS, parse_line, last)


def parse_line(text: bytes) -> Line:
    """Return a line; raise ValueError if it is none."""
    values: dict[str, Any] = records.parse(text, dict[str, Any])
    if values.get("event") not in READ:
        values = {key: values[key] for key in ("event", "time") if key in values}
    line: Line = records.build(Line, values)
    return line


def read_summary(run: Path) -> Summary | None:
    """Return the summary of a run, None if it has not ended; raise DataError."""
    return records.read(run / SUMMARY, Summary)
