"""The jobs of runs: their records and states, how they are shown, and how they are cancelled."""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from hvdtrain import __version__
from hvdtrain.errors import DataError, UsageError
from hvdtrain.health import heartbeat
from hvdtrain.host import files, output, records
from hvdtrain.jobs import slurm
from hvdtrain.jobs.slurm import State
from hvdtrain.training import metrics
from hvdtrain.training.metrics import Line

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


def job_states(runs: Mapping[Path, Record]) -> dict[Path, dict[str, State]]:
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
        UsageError: as `job_states`.
        DataError: as `read`.
    """
    runs = list(runs)
    known = job_states({run: record for run in runs if (record := read(run)) is not None})
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


TAIL = 2**20  # bytes that are read from the end of a file
SAVED = ", state saved"
UNREADABLE = "UNREADABLE"  # the state of a run whose record cannot be used
POLL_SECONDS = 1.0
STATE_POLL_SECONDS = 15.0  # between two queries of a job's state


@dataclass(frozen=True)
class Row:
    """A run in the table of `jobs status`; unknown values are None."""

    run: str
    job: str
    state: str
    nodes: str
    elapsed: str
    epoch: int | None = None
    step: int | None = None
    accuracy: float | None = None
    images_per_second: float | None = None
    heartbeat_seconds: float | None = None
    note: str = ""


def rows(runs: Mapping[Path, Record], faults: Mapping[Path, str]) -> list[Row]:
    """Return one row per run: its first running job, else the first waiting, else the newest.

    Args:
        faults: why the records of other runs cannot be used.
    """
    states = job_states(runs)
    table = [Row(str(run), "-", UNREADABLE, "", "", note=fault) for run, fault in faults.items()]
    for run, job_record in runs.items():
        job = (_in_order(job_record, states[run]) or job_record.jobs[::-1])[0]
        table.append(_row(run, job_record, job, states[run].get(job)))
    return sorted(table, key=lambda row: row.run) if faults else table


def _in_order(job_record: Record, states: Mapping[str, State]) -> list[str]:
    """Return the running jobs of a run, then the waiting ones."""
    active = [job for job in job_record.jobs if job in states and states[job].is_active]
    return sorted(active, key=lambda job: states[job].state != "RUNNING")


def _row(run: Path, job_record: Record, job: str, state: State | None) -> Row:
    if (run / "summary.json").exists():  # renamed when a run resumes
        state = replace(state or State(""), state="COMPLETED", reason="")
    elif state is None:  # Slurm no longer knows the job, or its local process has ended
        state = State("FAILED")
    lines, note = [Line("")], state.reason if state.is_active else ""
    try:
        lines += metrics.read_lines(run, TAIL)
    except DataError as error:
        note = str(error)
    last = [line for line in lines if line.event in ("", "step", "epoch")][-1]
    if not note and not state.is_active and state.state != "COMPLETED":
        faults = [line.message for line in lines if line.event in ("", "fault")]
        note = slurm.CURES.get(state.state) or _last_line(job_record, job) or faults[-1]
    return Row(
        run=str(run),
        job=job,
        state=state.state,
        nodes=state.nodes,
        elapsed=state.elapsed,
        epoch=last.epoch,
        step=last.step,
        accuracy=_accuracy(lines),
        images_per_second=last.images_per_second,
        heartbeat_seconds=_heartbeat_seconds(run, job_record.ranks),
        note=note,
    )


def _accuracy(lines: list[Line]) -> float | None:
    """Return the validation accuracy, else the test accuracy, of the last evaluated epoch."""
    epochs = [line for line in reversed(lines) if line.event == "epoch"]
    known = [value for line in epochs for value in (line.val_accuracy, line.test_accuracy)]
    return next((value for value in known if value is not None), None)


def _heartbeat_seconds(run: Path, ranks: int) -> float | None:
    """Return the seconds since the oldest of the ranks' last signs of life, or None."""
    paths = [(path.stem[5:], path) for path in (run / "heartbeats").glob("rank-*.json")]
    beats = [heartbeat.read(p) for rank, p in paths if rank.isdecimal() and int(rank) < ranks]
    times = [beat.time for beat in beats if beat is not None]
    return max(0.0, time.time() - min(times)) if times else None


def _last_line(job_record: Record, job: str) -> str:
    """Return the last error line of hvdtrain in a job's logs, else the last line of any program.

    Lines of earlier starts of the job, which ended with their state saved, are skipped.
    """
    last = ""
    for path in sorted(Path(job_record.logs).glob(f"{job}_*_log.err")):
        with suppress(OSError):
            text = records.tail(path, TAIL).decode(errors="replace")
            lines = [line for line in text.splitlines() if line.strip()]
            ours = [line for line in lines if line.startswith("hvdtrain: ") and SAVED not in line]
            if ours and not ours[-1].endswith(":"):  # the heading of a traceback
                return ours[-1].removeprefix("hvdtrain: ")
            last = last or (lines[-1] if lines else "")
    return last


def as_text(rows: Sequence[Row]) -> str:
    """Return a table as wide as the terminal, followed by the last messages of failed jobs."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "job", "state", "nodes"):
        table.add_column(name, overflow="fold")
    for name in ("elapsed", "epoch", "step", "accuracy", "images/s", "last heartbeat"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        numbers = (
            *((row.epoch, ""), (row.step, ","), (row.accuracy, ".4f")),
            (row.images_per_second, ",.0f"),
        )
        table.add_row(
            *(row.run, row.job, row.state, row.nodes, row.elapsed),
            *("-" if value is None else format(value, form) for value, form in numbers),
            _ago(row.heartbeat_seconds),
        )
    text = io.StringIO()
    width = max(shutil.get_terminal_size((160, 24)).columns, 100)
    output.console(file=text, width=width).print(table)
    notes = [f"{row.run}: {row.note}" for row in rows if row.note]
    return "\n".join([*(line.rstrip() for line in text.getvalue().splitlines()), *notes])


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def show_logs(run: str, rank: int, follow: bool) -> None:
    """Print standard output and standard error of a rank of the running or newest job.

    With `follow`, continue until that job has ended; wait if the job has not started yet.

    Raises:
        UsageError: if the run has no job, or the job no such rank.
    """
    folder = Path(run)
    job_record = read(folder)
    if job_record is None:
        inside = [one for one in sorted(folder.glob("*")) if os.path.lexists(one / RECORD)]
        if inside:
            raise UsageError(
                f"{run} holds {len(inside)} runs with jobs: name one, as in hvdtrain jobs logs "
                f"{inside[0]}"
            )
        raise UsageError(f"{run} has no job: start one with hvdtrain jobs submit")
    if not 0 <= rank < job_record.ranks:
        raise UsageError(f"--rank {rank} does not exist: give 0 to {job_record.ranks - 1}")
    rank = rank if job_record.cluster == "slurm" else 0  # locally one task starts all ranks
    job = _job_to_show(folder, job_record, rank)
    if not follow and not _log_files(job_record, job, rank):
        raise UsageError(f"job {job} has printed nothing yet: wait for it with --follow")
    offsets: dict[Path, int] = {}
    last_query, is_over = 0.0, not follow
    while True:
        if follow and time.monotonic() - last_query > STATE_POLL_SECONDS:
            state = job_states({folder: job_record})[folder].get(job)
            last_query, is_over = time.monotonic(), state is None or not state.is_active
        for path in _log_files(job_record, job, rank):
            offsets[path] = _print_from(path, offsets.get(path, 0))
        if is_over:
            return
        time.sleep(POLL_SECONDS)


def _job_to_show(run: Path, job_record: Record, rank: int) -> str:
    """Return the running job, else the first waiting one, else the newest that has output."""
    active = _in_order(job_record, job_states({run: job_record})[run])
    newest_first = job_record.jobs[::-1]
    printed = [job for job in newest_first if _log_files(job_record, job, rank)]
    return [*active, *printed, *newest_first][0]


def _log_files(job_record: Record, job: str, rank: int) -> list[Path]:
    """Return the existing log files of a rank: standard output, then standard error."""
    paths = [Path(job_record.logs) / f"{job}_{rank}_log.{end}" for end in ("out", "err")]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def _print_from(path: Path, offset: int) -> int:
    with records.opened(path) as file:
        file.seek(offset)
        content = file.read()
    target = sys.stderr if path.suffix == ".err" else sys.stdout
    target.write(content.decode(errors="replace"))
    target.flush()
    return offset + len(content)


def cancel(runs: Iterable[str]) -> Iterator[str]:
    """Cancel all waiting and running jobs of these runs; yield one line per job.

    Raises:
        UsageError: if there is no such run, or Slurm refuses.
        DataError: once the others are cancelled, if a record cannot be used.
    """
    queued: list[str] = []
    processes: set[int] = set()  # without Slurm one process makes all runs of a study
    lines = []
    known, faults = runs_of(runs)
    for run, numbers in active(known).items():
        if known[run].cluster == "slurm":
            queued += numbers
        elif known[run].host == socket.gethostname():
            processes |= set(map(int, numbers))
        elif numbers:
            raise UsageError(f"{run} runs on {known[run].host}: cancel it there")
        lines += [f"{run}: job {job} cancelled" for job in numbers]
        if not numbers:
            lines.append(f"{run}: no job is waiting or running")
    if queued:
        slurm.cancel(queued)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(process).send_signal(signal.SIGINT)
    yield from lines
    if faults:
        raise DataError(f"{next(iter(faults.values()))} (the other runs are cancelled)")
