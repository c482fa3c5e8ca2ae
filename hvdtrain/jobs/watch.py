"""Report the state of runs' jobs, from Slurm and from the files that the runs write."""

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

TAIL = 2**20  # bytes that are read from the end of a file
SAVED = ", state saved"
START_ONE = "start a job with hvdtrain jobs submit, or name the folder that holds the runs"
FRESH_SECONDS = 60.0  # a run with a heartbeat younger than this is running


@dataclass(frozen=True)
class Row:
    """A run in the table of `jobs status`; unknown values are None."""

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
    """Return the runs with jobs among these folders and the folders in them.

    Raises:
        UsageError: if there is none.
        DataError: if a record cannot be parsed.
    """
    paths, runs = list(paths), []
    for path in map(Path, paths):
        if not path.is_dir():
            raise UsageError(f"{path} is not a folder: {START_ONE}")
        candidates = [path] if (path / record.RECORD).exists() else sorted(path.iterdir())
        for folder in candidates:
            if folder.is_dir() and (job_record := record.read(folder)) is not None:
                runs.append((folder, job_record))
    if not runs:
        raise UsageError(f"{', '.join(paths)} holds no run with a job: {START_ONE}")
    return runs


def states(runs: Iterable[tuple[Path, Record]]) -> list[dict[str, State]]:
    """Return, for each run, the states of its jobs that are still known, by job number.

    Slurm is queried once for all runs.

    Raises:
        UsageError: if Slurm does not answer.
    """
    runs = list(runs)
    on_slurm = [job_record for _, job_record in runs if job_record.cluster == "slurm"]
    known = slurm.states([number for job_record in on_slurm for number in job_record.jobs])
    return [_states_of(run, job_record, known) for run, job_record in runs]


def active(runs: Iterable[Path]) -> dict[Path, list[str]]:
    """Return the waiting and running jobs of each run folder; none for a run without a record.

    Raises:
        UsageError, DataError: as `states` and `runs_of`.
    """
    active_jobs: dict[Path, list[str]] = {run: [] for run in runs}
    with_record = [
        (run, job_record) for run in active_jobs if (job_record := record.read(run)) is not None
    ]
    for (run, _), job_states in zip(with_record, states(with_record), strict=True):
        active_jobs[run] = [number for number, state in job_states.items() if state.is_active]
    return active_jobs


def _states_of(run: Path, job_record: Record, known: Mapping[str, State]) -> dict[str, State]:
    """Return the states of a run's jobs, from Slurm's or from this machine's."""
    if job_record.cluster == "slurm":
        # Compare names: job numbers start again after Slurm was set up again.
        same_number = {number: known[number] for number in job_record.jobs if number in known}
        return {
            number: state for number, state in same_number.items() if state.name == job_record.name
        }
    state = _local_state(run, job_record)
    return {job_record.jobs[-1]: state} if state is not None else {}


def _local_state(run: Path, job_record: Record) -> State | None:
    """Return the state of a run without Slurm, or None if it is over.

    One process makes the runs of a study in turn, so its state alone is not that of a run.
    """
    beat = _beat(run, 0)
    has_started = beat is not None and beat["time"] > job_record.submitted
    if job_record.host != socket.gethostname():
        is_fresh = beat is not None and time.time() - beat["time"] < FRESH_SECONDS
        return State("RUNNING") if is_fresh else None
    if not _is_alive(job_record.jobs[-1]):
        return None
    if not has_started:
        return State("PENDING")
    assert beat is not None
    return State("RUNNING") if psutil.pid_exists(int(beat["pid"])) else None


def rows(runs: Iterable[tuple[Path, Record]]) -> list[Row]:
    """Return one row per run: its first running job, else the first waiting, else the newest."""
    runs = list(runs)
    table = []
    for (run, job_record), known in zip(runs, states(runs), strict=True):
        jobs = job_record.jobs
        job = next((n for n in jobs if n in known and known[n].state == "RUNNING"), "")
        job = job or next((n for n in jobs if n in known and known[n].is_active), jobs[-1])
        table.append(_row(run, job_record, job, known.get(job)))
    return table


def _row(run: Path, job_record: Record, job: str, state: State | None) -> Row:
    if (run / "summary.json").exists():  # renamed when a run resumes
        state = replace(state or State(""), state="COMPLETED", reason="")
    elif state is None:  # Slurm no longer knows the job, or its local process has ended
        state = State("FAILED")
    lines = _metrics(run)
    steps = [line for line in lines if line.get("event") in ("step", "epoch")]
    epochs = [line for line in lines if line.get("event") == "epoch"]
    faults = [line for line in lines if line.get("event") == "fault"]
    last = steps[-1] if steps else {}
    note = state.reason if state.is_active else ""
    if not state.is_active and state.state != "COMPLETED":
        note = last_line(job_record, job) or (faults[-1].get("message", "") if faults else "")
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
        heartbeat_seconds=_heartbeat(run, job_record.ranks),
        note=note,
    )


def _accuracy(epochs: list[dict[str, Any]]) -> float | None:
    """Return the validation accuracy, else the test accuracy, of the last evaluated epoch."""
    kinds = ("val_accuracy", "test_accuracy")
    known = [line.get(kind) for line in reversed(epochs) for kind in kinds]
    return next((value for value in known if value is not None), None)


def log_files(job_record: Record, job: str, rank: int) -> list[Path]:
    """Return the existing log files of a rank: standard output, then standard error."""
    paths = [Path(job_record.logs) / f"{job}_{rank}_log.{end}" for end in ("out", "err")]
    return [path for path in paths if path.exists()]


def last_line(job_record: Record, job: str) -> str:
    """Return the last error line of hvdtrain in a job's logs, else the last line of any program.

    Lines of earlier starts of the job, which ended with their state saved, are skipped.
    """
    last = ""
    for path in sorted(Path(job_record.logs).glob(f"{job}_*_log.err")):
        lines = [line for line in _tail(path).splitlines() if line.strip()]
        hvdtrains = [line for line in lines if line.startswith("hvdtrain: ") and SAVED not in line]
        if hvdtrains and not hvdtrains[-1].endswith(":"):  # the heading of a traceback
            return hvdtrains[-1].removeprefix("hvdtrain: ")
        last = last or (lines[-1] if lines else "")
    return last


def _metrics(run: Path) -> list[dict[str, Any]]:
    """Return the last records of `metrics.jsonl`, without a half-written one."""
    records = []
    for line in _tail(run / "metrics.jsonl").splitlines():
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            records.append(content)
    return records


def _heartbeat(run: Path, ranks: int) -> float | None:
    """Return the seconds since the oldest of the ranks' last signs of life, or None."""
    beats = [_beat(run, rank) for rank in range(ranks)]
    times = [beat["time"] for beat in beats if beat is not None]
    return time.time() - min(times) if times else None


def _beat(run: Path, rank: int) -> dict[str, float] | None:
    """Return `time` and `pid` of a rank's last heartbeat, or None if it cannot be read."""
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
