"""Records of a run: its folder, `metrics.jsonl`, `summary.json` and the ledger."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, Any

from hvdtrain import configfile
from hvdtrain.config import TrainConfig
from hvdtrain.engine.folders import RunFolder
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import records
from hvdtrain.host.counters import Disturbance
from hvdtrain.host.files import (
    OWN_FOLDER,
    make_folders,
    plain_name,
    sync,
    write_text,
    write_whole,
)

BUFFER_BYTES = 2**16
LEDGER_HEADER = "epoch,step,rank,sample\n"
# The launcher sets this variable: one line per earlier start, with the fault that ended it.
AFTER_FAULTS = "HVDTRAIN_AFTER_FAULTS"


def holds_run(path: Path) -> bool:
    """Return whether a folder holds a run that `--resume` can continue.

    Raises:
        UsageError: if there can be no such folder, or if it holds checkpoints, which a new run
            would prune, but no configuration.
    """
    try:
        if path.exists() and not path.is_dir():
            raise UsageError(f"--run {path} is a file: name a folder")
        folder = RunFolder(path)
        is_there = folder.config.exists()
        is_left = not is_there and any(folder.checkpoints.glob("step-*"))
    except OSError as error:
        raise UsageError(f"--run {path}: {error.strerror}: choose another --run") from None
    if is_left:
        raise UsageError(
            f"{path} holds checkpoints of a run, but its config.yaml is missing: restore "
            f"{folder.config}, or choose another --run"
        )
    return is_there


def no_run(path: Path) -> UsageError:
    """Return the error about a folder that holds no run to resume."""
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        shown = [*names[:3], "..."] if len(names) > 3 else names
        content = f"it holds {', '.join(shown)} and no config.yaml" if names else "it is empty"
    else:
        content = "there is no such folder"
    return UsageError(
        f"{path} holds no run to resume ({content}): correct --run, "
        "or start a run there with --resume auto"
    )


def find_folder(config: TrainConfig) -> tuple[RunFolder, bool]:
    """Return the folder of a run, and whether the run in it is resumed.

    A run without a name gets a new folder. One rank calls this and broadcasts the result, since
    it decides what `--resume auto` means and the folder may change between two calls.

    Raises:
        UsageError: if the folder holds another run, or no run with `--resume`.
        DataError: if the folder cannot be created.
    """
    if config.run is None:
        return RunFolder(make_folder(config)), False
    folder = RunFolder(Path(config.run))
    is_there = holds_run(folder.path)
    if is_there:
        changed = configfile.differences(configfile.load(folder.config), config)
        if changed:
            raise UsageError(
                f"{folder.path} holds a run of another configuration ({'; '.join(changed)}): "
                "give the options of that run, or choose another --run"
            )
        if not config.resume:
            raise UsageError(
                f"{folder.path} holds this run already: add --resume to continue it, "
                "or choose another --run"
            )
    elif config.resume is True:
        raise no_run(folder.path)
    return folder, is_there


def summary_of_finished(config: TrainConfig) -> dict[str, Any] | None:
    """Return the summary of a run that is resumed with nothing left to do, None for any other.

    Raises:
        UsageError: as `find_folder`.
    """
    folder = RunFolder(Path(config.run or ""))
    if not (config.resume and config.run and folder.summary.is_file()):
        return None
    try:
        summary: dict[str, Any] = json.loads(records.content(folder.summary))
        length = round(summary["samples"] / summary["epochs"])
        evaluates = config.eval_every > 0 and config.emulate is None
        if evaluates and summary["final"]["test_loss"] is None:
            return None
        if summary["samples"] < config.total_samples(length):
            return None
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        return None
    return summary if find_folder(config)[1] else None


class AppendOnly:
    """A text file that grows, and is cut back to a checkpoint's position on resume.

    Raises:
        DataError: if the file cannot be written, or is shorter than `keep_bytes`.
    """

    def __init__(self, path: Path, keep_bytes: int) -> None:
        self.path = path
        with _writing(path):
            # Only the owner may write: a job that resumes the run executes what its folder names.
            make_folders(path.parent, OWN_FOLDER)
            path.touch()
            if path.stat().st_size < keep_bytes:
                raise DataError(f"{path} is shorter than the checkpoint says: it was cut")
            if path.is_file():
                # A new file: a process of an abandoned run may still write to the old one.
                held = path.resolve()
                write_whole(held, lambda file: _copy(held, file, keep_bytes))
            self.file = path.open("ab", buffering=0)
        self.waiting = bytearray()  # keeps what a full disk could not take

    def write(self, text: str) -> None:
        """Append text; it reaches the disk with the next `flush` and `sync`."""
        self.waiting += text.encode()
        if len(self.waiting) > BUFFER_BYTES:
            self.show()

    def show(self) -> None:
        """Flush for readers; keep the text for the next attempt if the disk cannot take it."""
        with suppress(DataError):
            self.flush()

    def flush(self) -> None:
        """Write the appended text to the file."""
        with _writing(self.path):
            while self.waiting:
                del self.waiting[: self.file.write(self.waiting)]

    def sync(self) -> None:
        """Sync what was flushed to the disk; other threads may write meanwhile."""
        with _writing(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file; text that waits is lost."""
        self.file.close()

    def size(self) -> int:
        """Flush, and return the size of the file in bytes."""
        self.flush()
        return self.path.stat().st_size


class Records:
    """metrics.jsonl, TensorBoard and the ledger of a run; creates its folder if there is none.

    Args:
        folder: the run folder.
        config: the configuration, written when all other files are in place.
        kept: the progress of the checkpoint that the run resumes from; empty at the start.

    Raises:
        UsageError: if the ledger file has other content.
        DataError: if a file cannot be written.
    """

    def __init__(self, folder: RunFolder, config: TrainConfig, kept: dict[str, Any]) -> None:
        self.folder = folder
        self.ledger = None
        if config.ledger:
            earlier = folder.config.exists() and configfile.load(folder.config).get("ledger")
            is_own = config.resume and earlier == config.ledger
            self.ledger = _open_ledger(Path(config.ledger), kept, is_own)
        self.metrics = AppendOnly(folder.metrics, kept.get("metrics_bytes", 0))
        from hvdtrain.training.board import Board  # loads TensorBoard, on rank 0 alone

        with _writing(folder.tensorboard):
            self.board = Board(folder.tensorboard, kept["step"] + 1 if kept else None)
        for subfolder in (folder.heartbeats, folder.checkpoints):
            with _writing(subfolder):
                make_folders(subfolder)
        configfile.save(config, folder.config)
        if faults := os.environ.get(AFTER_FAULTS):
            held = folder.metrics.read_text()
            for message in filter(None, faults.split("\n")):
                if json.dumps(message) not in held:  # was cut with what followed the checkpoint
                    step = kept.get("step", 0)
                    self.event("fault", step=step, cause="rank failed", message=message)

    def event(self, event: str, **values: Any) -> None:
        """Append one line to metrics.jsonl; add numbers of steps and epochs to TensorBoard."""
        line = {"event": event, "time": round(time.time(), 3), **values}
        self.metrics.write(json.dumps(line) + "\n")
        if event in ("step", "epoch"):
            self.metrics.show()
            for name, value in values.items():
                if isinstance(value, int | float) and name not in ("step", "epoch"):
                    self.board.add(f"{event}/{name}", value, values["step"])

    def write_ledger(self, lines: list[str]) -> None:
        """Append one text per rank, each of whole lines."""
        if self.ledger is not None:
            self.ledger.write("".join(lines))

    def sizes(self) -> dict[str, Any]:
        """Return the file sizes for a checkpoint, which must be committed after `sync`."""
        self.board.flush()
        kept: dict[str, Any] = {"metrics_bytes": self.metrics.size()}
        if self.ledger is not None:
            kept["ledger"] = str(self.ledger.path.resolve())
            kept["ledger_bytes"] = self.ledger.size()
        return kept

    def sync(self) -> None:
        """Sync to the disk what `sizes` counted; other threads may write meanwhile."""
        self.metrics.sync()
        if self.ledger is not None:
            self.ledger.sync()

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Sync all files to the disk, and write summary.json if there is a summary."""
        self.sizes()
        self.sync()
        if summary is not None:
            text = json.dumps(summary, indent=1) + "\n"
            write_text(self.folder.summary, text, "the summary", DataError)

    def close(self) -> None:
        """Close all files, which a program that trains several times would keep open."""
        self.board.close()
        self.metrics.close()
        if self.ledger is not None:
            self.ledger.close()


def _copy(source: Path, target: IO[bytes], count: int) -> None:
    """Copy the first `count` bytes of a file."""
    with source.open("rb") as file:
        while count > 0 and (piece := file.read(min(count, 2**22))):
            target.write(piece)
            count -= len(piece)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a DataError of one line."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None


def make_folder(config: TrainConfig) -> Path:
    """Create and return a new folder under `runs/`, named by time and model.

    Raises:
        DataError: if the folder cannot be created.
    """
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{plain_name(config.model)}"
    for number in count(1):
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        try:
            # Two jobs that start in the same second must not share a folder.
            make_folders(path.parent)
            path.mkdir(OWN_FOLDER)
            sync(path.parent)
        except FileExistsError:
            continue
        except OSError as error:
            raise DataError(f"{path} cannot be created: {error.strerror}") from None
        return path
    raise AssertionError("count never ends")


def _open_ledger(path: Path, kept: dict[str, Any], is_own: bool) -> AppendOnly:
    """Return the ledger, cut to the bytes in `kept`.

    Args:
        is_own: whether an earlier start of this run wrote it.
    """
    if kept.get("ledger") == str(path.resolve()):
        return AppendOnly(path, kept["ledger_bytes"])
    try:
        if is_own:  # the earlier start ended before its first checkpoint
            path.unlink(missing_ok=True)
        held = path.read_text() if path.exists() else ""
    except (OSError, UnicodeDecodeError):
        held = "something else"
    if held not in ("", LEDGER_HEADER):
        raise UsageError(f"the ledger {path} exists already: remove it or name another")
    ledger = AppendOnly(path, 0)
    ledger.write(LEDGER_HEADER)
    return ledger


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
