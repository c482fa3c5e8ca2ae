"""Show and cancel the jobs of runs, from Slurm and from the files that the runs write."""

import io
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from hvdtrain.errors import DataError, UsageError
from hvdtrain.health import heartbeat
from hvdtrain.host import output, records
from hvdtrain.jobs import record, slurm
from hvdtrain.jobs.record import Record
from hvdtrain.jobs.slurm import State
from hvdtrain.training import metrics
from hvdtrain.training.metrics import Line

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
    states = record.states(runs)
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
        note = _last_line(job_record, job) or faults[-1]
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
    job_record = record.read(folder)
    if job_record is None:
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
            state = record.states({folder: job_record})[folder].get(job)
            last_query, is_over = time.monotonic(), state is None or not state.is_active
        for path in _log_files(job_record, job, rank):
            offsets[path] = _print_from(path, offsets.get(path, 0))
        if is_over:
            return
        time.sleep(POLL_SECONDS)


def _job_to_show(run: Path, job_record: Record, rank: int) -> str:
    """Return the running job, else the first waiting one, else the newest that has output."""
    active = _in_order(job_record, record.states({run: job_record})[run])
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
    known, faults = record.runs_of(runs)
    for run, active in record.active(known).items():
        if known[run].cluster == "slurm":
            queued += active
        elif known[run].host == socket.gethostname():
            processes |= set(map(int, active))
        elif active:
            raise UsageError(f"{run} runs on {known[run].host}: cancel it there")
        lines += [f"{run}: job {job} cancelled" for job in active]
        if not active:
            lines.append(f"{run}: no job is waiting or running")
    if queued:
        slurm.cancel(queued)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(process).send_signal(signal.SIGINT)
    yield from lines
    if faults:
        raise DataError(f"{next(iter(faults.values()))} (the other runs are cancelled)")
