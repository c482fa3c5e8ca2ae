"""How the jobs of runs fare: by Slurm, and by what the runs write themselves."""

import json
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.errors import UsageError
from hvdtrain.jobs import record, slurm
from hvdtrain.jobs.record import Record
from hvdtrain.jobs.slurm import State

TAIL = 2**20  # bytes of metrics that are looked at
SAVED = ", state saved"
START_ONE = "start a job with hvdtrain jobs submit, or name the folder that holds the runs"
FRESH_SECONDS = 60.0  # a sign of life this old is that of a run


@dataclass(frozen=True)
class Row:
    """A run in the table of `jobs status`; what is not known is None."""

    run: str
    job: str
    state: str
    nodes: str
    elapsed: str
    epoch: int | None
    step: int | None
    accuracy: float | None
    images_per_second: float | None
    heartbeat_seconds: float | None
    note: str


def runs_of(paths: Iterable[str]) -> list[tuple[Path, Record]]:
    """The run folders with jobs among these folders and the folders in them.

    Raises:
        UsageError: if there is none.
        DataError: if a record cannot be understood.
    """
    paths, found = list(paths), []
    for path in map(Path, paths):
        if not path.is_dir():
            raise UsageError(f"there is no folder {path}: {START_ONE}")
        candidates = [path] if (path / record.RECORD).exists() else sorted(path.iterdir())
        for folder in candidates:
            if folder.is_dir() and (kept := record.read(folder)) is not None:
                found.append((folder, kept))
    if not found:
        raise UsageError(f"{', '.join(paths)} holds no run with a job: {START_ONE}")
    return found


def states(runs: Iterable[tuple[Path, Record]]) -> list[dict[str, State]]:
    """For each run the states of its jobs that are still known, by number.

    Raises:
        UsageError: if Slurm does not answer; it is asked once.
    """
    runs = list(runs)
    numbers = [number for _, kept in runs if kept.cluster == "slurm" for number in kept.jobs]
    known = slurm.states(numbers)
    return [_own(run, kept, known) for run, kept in runs]


def active(runs: Iterable[Path]) -> dict[Path, list[str]]:
    """The jobs of each of these run folders that wait or run; none where none was made.

    Raises:
        UsageError, DataError: as `states` and `runs_of`.
    """
    found: dict[Path, list[str]] = {run: [] for run in runs}
    having = [(run, kept) for run in found if (kept := record.read(run)) is not None]
    for (run, _), own in zip(having, states(having), strict=True):
        found[run] = [number for number, state in own.items() if state.is_active]
    return found


def _own(run: Path, kept: Record, known: Mapping[str, State]) -> dict[str, State]:
    """Of what Slurm, or this machine, knows, what belongs to a run."""
    if kept.cluster == "slurm":
        # Numbers begin again where Slurm was set up anew.
        own = {number: known[number] for number in kept.jobs if number in known}
        return {number: state for number, state in own.items() if state.name == kept.name}
    state = _local_state(run, kept)
    return {kept.jobs[-1]: state} if state is not None else {}


def _local_state(run: Path, kept: Record) -> State | None:
    """The state of a run without Slurm; None if it is over.

    One process makes the runs of a study in turn, so that what it does is not what a run does.
    """
    beat = _beat(run, 0)
    has_begun = beat is not None and beat["time"] > kept.submitted
    if kept.host != socket.gethostname():
        is_fresh = beat is not None and time.time() - beat["time"] < FRESH_SECONDS
        return State("RUNNING") if is_fresh else None
    if not _is_alive(kept.jobs[-1]):
        return None
    if not has_begun:
        return State("PENDING")
    assert beat is not None
    return State("RUNNING") if psutil.pid_exists(int(beat["pid"])) else None


def rows(runs: Iterable[tuple[Path, Record]]) -> list[Row]:
    """One line for each run, of its newest job that runs, else of its newest."""
    runs = list(runs)
    found = []
    for (run, kept), own in zip(runs, states(runs), strict=True):
        job = next((n for n in kept.jobs if n in own and own[n].state == "RUNNING"), "")
        job = job or next((n for n in kept.jobs if n in own and own[n].is_active), kept.jobs[-1])
        found.append(_row(run, kept, job, own.get(job)))
    return found


def _row(run: Path, kept: Record, job: str, state: State | None) -> Row:
    if (run / "summary.json").exists():  # it is put aside when a run goes on
        state = replace(state or State(""), state="COMPLETED", reason="")
    elif state is None:  # Slurm has forgotten it, or it was a process of a machine
        state = State("FAILED")
    lines = _metrics(run)
    steps = [line for line in lines if line.get("event") in ("step", "epoch")]
    epochs = [line for line in lines if line.get("event") == "epoch"]
    faults = [line for line in lines if line.get("event") == "fault"]
    last = steps[-1] if steps else {}
    note = state.reason if state.is_active else ""
    if not state.is_active and state.state != "COMPLETED":
        note = last_line(kept, job) or (faults[-1].get("message", "") if faults else "")
    return Row(
        run=str(run),
        job=job,
        state=state.state,
        nodes=state.nodes,
        elapsed=state.elapsed,
        epoch=last.get("epoch"),
        step=last.get("step"),
        accuracy=_accuracy(epochs),
        images_per_second=last.get("images_per_second"),
        heartbeat_seconds=_heartbeat(run, kept.ranks),
        note=note,
    )


def _accuracy(epochs: list[dict[str, Any]]) -> float | None:
    """The validation accuracy, else the test accuracy, of the last epoch that was evaluated."""
    kinds = ("val_accuracy", "test_accuracy")
    known = [line.get(kind) for line in reversed(epochs) for kind in kinds]
    return next((value for value in known if value is not None), None)


def log_files(kept: Record, job: str, rank: int) -> list[Path]:
    """What a rank of a job has printed: standard output, then standard error."""
    stem = f"{job}_{rank}_log"
    return [path for end in ("out", "err") if (path := Path(kept.logs) / f"{stem}.{end}").exists()]


def last_line(kept: Record, job: str) -> str:
    """The last line of hvdtrain's own that a rank of a job has printed, else the last of all.

    What earlier starts of the job said when they left with their state saved does not count.
    """
    found = ""
    for path in sorted(Path(kept.logs).glob(f"{job}_*_log.err")):
        lines = [line for line in _tail(path).splitlines() if line.strip()]
        own = [line for line in lines if line.startswith("hvdtrain: ") and SAVED not in line]
        if own and not own[-1].endswith(":"):  # the heading of a traceback
            return own[-1].removeprefix("hvdtrain: ")
        found = found or (lines[-1] if lines else "")
    return found


def _metrics(run: Path) -> list[dict[str, Any]]:
    """The last lines of `metrics.jsonl`; a half-written one is left out."""
    found = []
    for line in _tail(run / "metrics.jsonl").splitlines():
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            found.append(content)
    return found


def _heartbeat(run: Path, ranks: int) -> float | None:
    """Seconds since the last sign of life of the rank that has been silent longest."""
    beats = [_beat(run, rank) for rank in range(ranks)]
    times = [beat["time"] for beat in beats if beat is not None]
    return time.time() - min(times) if times else None


def _beat(run: Path, rank: int) -> dict[str, float] | None:
    """When a rank gave its last sign of life, and its process."""
    path = run / "heartbeats" / f"rank-{rank:04d}.json"
    try:
        content = json.loads(path.read_text())
        return {name: float(content[name]) for name in ("time", "pid")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _is_alive(number: str) -> bool:
    try:
        return "submitit" in " ".join(psutil.Process(int(number)).cmdline())
    except (psutil.Error, ValueError):
        return False
