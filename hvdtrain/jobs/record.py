"""The jobs of a run: the record in its folder, and the states of the jobs that it names."""

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from hvdtrain import __version__
from hvdtrain.errors import DataError, UsageError
from hvdtrain.health import heartbeat
from hvdtrain.host import files, records
from hvdtrain.jobs import slurm
from hvdtrain.jobs.slurm import State

RECORD = "job.json"
LOGS = "logs"
PATCH = "code.patch"
START_ONE = "start a job with hvdtrain jobs submit, or name the folder that holds the runs"
FRESH_SECONDS = 60.0  # a run with a heartbeat younger than this is running
JOB = re.compile(r"\d{1,18}(_\d{1,9})?")  # a job, or an element of an array
REMOVE = "remove it, and the run has no job"


@dataclass(frozen=True)
class Record:
    """The jobs of a run.

    Attributes:
        cluster: "slurm" or "local".
        host: name of the host that submitted them.
        name: name of the jobs.
        jobs: job numbers, the newest last.
        ranks, nodes: requested numbers of ranks and nodes.
        logs: folder with the output of the jobs.
        submitted: time of the newest submission, in seconds since 1970.
        version: version of hvdtrain, with the commit if it runs from a git clone.
    """

    cluster: str
    host: str
    name: str
    jobs: tuple[str, ...]
    ranks: int
    nodes: int
    logs: str
    submitted: float
    version: str


def write(run: Path, record: Record) -> None:
    """Write the record into the run folder.

    Raises:
        DataError: if it cannot be written.
    """
    text = json.dumps(asdict(record), indent=1)
    files.write_text(run / RECORD, text, "the record", DataError)


def read(run: Path) -> Record | None:
    """Return the record of a run folder, or None if the run has no job.

    Raises:
        DataError: if it cannot be parsed.
    """
    path = run / RECORD
    record = records.read(path, Record, REMOVE)
    if record is not None and not all(map(JOB.fullmatch, record.jobs or ("",))):
        raise DataError(f"{path} names no job numbers: {REMOVE}")
    return record


def runs_of(paths: Iterable[str]) -> tuple[dict[Path, Record], dict[Path, str]]:
    """Return the records of the runs with jobs among these folders and the folders in them.

    The second result says of the other runs with jobs why their record cannot be used.

    Raises:
        UsageError: if there is none.
    """
    paths, runs, faults = list(paths), {}, {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise UsageError(f"{path} is not a folder: {START_ONE}")
        candidates = [path] if os.path.lexists(path / RECORD) else sorted(path.iterdir())
        for folder in filter(Path.is_dir, candidates):
            try:
                if (record := read(folder)) is not None:
                    runs[folder] = record
            except DataError as error:
                faults[folder] = str(error)
    if not runs and not faults:
        raise UsageError(f"{', '.join(paths)} holds no run with a job: {START_ONE}")
    return runs, faults


def states(runs: Mapping[Path, Record]) -> dict[Path, dict[str, State]]:
    """Return, for each run, the states of its jobs that are still known, by job number.

    Slurm is queried once for all runs.

    Raises:
        UsageError: if Slurm does not answer.
    """
    on_slurm = [record for record in runs.values() if record.cluster == "slurm"]
    known = slurm.states([number for record in on_slurm for number in record.jobs])
    by_run: dict[Path, dict[str, State]] = {}
    for run, record in runs.items():
        if record.cluster == "slurm":
            # Compare names: job numbers start again after Slurm was set up again.
            by_run[run] = {
                number: known[number]
                for number in record.jobs
                if number in known and known[number].name == record.name
            }
        else:
            state = _local_state(run, record)
            by_run[run] = {record.jobs[-1]: state} if state is not None else {}
    return by_run


def active(runs: Iterable[Path]) -> dict[Path, list[str]]:
    """Return the waiting and running jobs of each run folder; none for a run without a record.

    Raises:
        UsageError: as `states`.
        DataError: as `read`.
    """
    runs = list(runs)
    known = states({run: record for run in runs if (record := read(run)) is not None})
    return {
        run: [number for number, state in known.get(run, {}).items() if state.is_active]
        for run in runs
    }


def _local_state(run: Path, record: Record) -> State | None:
    """Return the state of a run without Slurm, or None if it is over.

    One process makes the runs of a study in turn, so its state alone is not that of a run.
    """
    beat = heartbeat.read(heartbeat.file_of(run / "heartbeats", 0))
    if record.host != socket.gethostname():
        is_fresh = beat is not None and time.time() - beat.time < FRESH_SECONDS
        return State("RUNNING") if is_fresh else None
    if not _is_alive(record.jobs[-1]):
        return None
    if beat is None or beat.time <= record.submitted:  # the run has not started
        return State("PENDING")
    exists = 0 < beat.pid < 2**31 and psutil.pid_exists(beat.pid)
    return State("RUNNING") if exists else None


def _is_alive(number: str) -> bool:
    try:
        return "submitit" in " ".join(psutil.Process(int(number)).cmdline())
    except (psutil.Error, ValueError, OverflowError):
        return False


def code_version() -> tuple[str, str]:
    """Return the version of the code, and the uncommitted changes of a git clone as a patch."""
    root = Path(__file__).parents[2]
    commit = _git(root, "describe", "--always", "--dirty", "--abbrev=12").strip()
    if not commit:
        return __version__, ""
    patch = _git(root, "diff", "HEAD") if commit.endswith("-dirty") else ""
    return f"{__version__}, {commit}", patch


def _git(root: Path, *arguments: str) -> str:
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, errors="replace"
        )
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""
