"""The launcher: it starts N ranks on this machine, streams their output and forwards signals.

`hvdtrain train --ranks N` outside another launcher uses it. mpirun runs in a separate session, so
that Ctrl-C reaches only this process, which forwards it as SIGUSR1: mpirun forwards that to the
ranks, while on SIGTERM or SIGINT it would kill them a quarter of a second later.
"""

import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from typing_extensions import override

from hvdtrain.errors import (
    DataError,
    HvdtrainError,
    Interrupted,
    Preempted,
    RankError,
    UsageError,
    shortened,
)
from hvdtrain.host import files, output
from hvdtrain.host.activity import IN_TRAINING, WATCH_SECONDS, Watch, last_activity, stuck_message
from hvdtrain.host.launchers import needed_by_mpirun, own_mpirun
from hvdtrain.host.output import without_launcher_banners
from hvdtrain.host.process import (
    StopRequest,
    end_with_parent,
    processes_ended_for_memory,
    suspend_with,
)
from hvdtrain.world import ACTIVITY

# Exit codes of ranks that have reported the reason themselves. mpirun also ends with 1 if it could
# not start the ranks; its remark then does not mention a process that exited.
REPORTED_BY_A_RANK = frozenset(
    error.exit_code
    for error in (HvdtrainError, UsageError, DataError, RankError, Preempted, Interrupted)
) | {0}
REMARKS_ON_A_RANK = ("MPI_ABORT was invoked", "non-zero status")
# The parent folder of mpirun's files. mpirun names its folder by its process number alone, and
# fails if a killed mpirun left a folder of the same number.
SESSIONS = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")  # of Open MPI 5, and 4
# Variables that a launcher sets for its ranks; with them a program would try to join the job.
LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_", "PMIX_", "PRTE_", "PMI_")
VERSION_SECONDS = 20
SECONDS_TO_END = 15.0  # time that mpirun may take to end ranks that do not respond
FEW_FILES = 256  # less than ranks on one machine may need
REPORT_PREFIX = "hvdtrain: "
SHOW_CURSOR = "\x1b[?25h"
AT_ONCE = "ended at once: the last checkpoint is unchanged"
BEFORE_TRAINING = "ended before training started"
# Ranks handle these signals from their start to their end, so a rank that such a signal killed
# had not started training, or had finished it.
BY_STOP_SIGNAL = r"signal \d+ \((User defined signal \d|Terminated|Hangup)\)"


@dataclass(frozen=True)
class Outcome:
    """The end of a job.

    Attributes:
        message: the last line that gives the reason; empty if there is none.
        was_due: whether the ranks were requested to stop after a given time.
    """

    code: int
    message: str
    was_due: bool = False


@dataclass(frozen=True)
class _Job:
    """A running mpirun, and its ranks.

    Attributes:
        activity: file in which the ranks record their actions.
        start_limit: seconds that any action may take before the first step; None if the ranks do
            not train, and so are not watched.
    """

    process: "subprocess.Popen[str]"
    ranks: int
    activity: Path
    start_limit: float | None

    def end(self, number: signal.Signals = signal.SIGINT) -> None:
        """End mpirun and its ranks at once."""
        os.killpg(self.process.pid, number)

    def handles_requests(self) -> bool:
        """Return whether the ranks stop by themselves on a request, after they have saved."""
        if self.start_limit is None:
            return True
        lines = (last_activity(self.activity, rank) for rank in range(self.ranks))
        return any(line.startswith(IN_TRAINING) for line in lines)


class RanksStop(StopRequest):
    """A request to stop that is forwarded to the ranks once, however many signals arrive.

    Attributes:
        job: the ranks; None while no rank runs.
        ended: how this launcher ended the ranks itself; empty if it did not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.job: _Job | None = None
        self.ended = ""

    @contextmanager
    def forwarded_to(self, job: _Job) -> Iterator[None]:
        """Forward requests, and Ctrl-Z, to this job in the block, including one from before."""
        self.job, before = job, None
        if self._previous:  # in the main thread
            before = signal.signal(signal.SIGTSTP, lambda *_: suspend_with(job.process.pid))
        try:
            if self.requested and not self.ended:
                self.on_request()
            yield
        finally:
            self.job = None
            if before is not None:
                signal.signal(signal.SIGTSTP, before)

    @override
    def on_request(self) -> None:
        if self.job is None:
            if self.interrupted:
                raise KeyboardInterrupt  # there is no rank to wait for
        elif self.job.handles_requests():
            self.job.process.send_signal(signal.SIGUSR1)
        else:  # some schedulers do not wait until libraries are loaded, and nothing can be lost
            self._end(self.job, BEFORE_TRAINING)

    @override
    def on_second_ctrl_c(self) -> None:
        if self.job is None:
            raise KeyboardInterrupt
        self._end(self.job, AT_ONCE)

    def _end(self, job: _Job, how: str) -> None:
        self.ended = self.ended or how
        job.end()

    def raise_if_requested(self) -> None:
        """End the command if it was requested to stop while no rank ran.

        Raises:
            Interrupted, Preempted: if it was.
        """
        if self.requested:
            raise (Interrupted if self.interrupted else Preempted)(BEFORE_TRAINING)


def run(ranks: int, arguments: Sequence[str]) -> int:
    """Run ranks as `supervise` does, and return the exit code alone."""
    return supervise(ranks, arguments).code


def supervise(
    ranks: int,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    stop: RanksStop | None = None,
    start_limit: float | None = None,
    module: str = "hvdtrain",
    stop_after: float | None = None,
) -> Outcome:
    """Run `python -m MODULE ARGUMENTS` on `ranks` ranks of this machine.

    Args:
        environment: variables for the ranks, added to this process's environment.
        stop: a stop request that is active already; by default one is active while the ranks run.
        start_limit: seconds that any action of a rank may take before its first step; later the
            rank records its limits. None: ranks are not watched.
        stop_after: seconds after which ranks that are watched are requested to save and stop.

    Raises:
        UsageError: if there is no MPI launcher.
        Interrupted, Preempted: if this process was requested to stop before it started the ranks.
    """
    with (
        nullcontext(stop) if stop else RanksStop() as stop,
        _folder_of_job() as (folder, folder_settings),
    ):
        # -P: no module in the current folder shadows one that hvdtrain needs.
        command = [*mpirun(ranks), sys.executable, "-P", "-m", module, *arguments]
        stop.raise_if_requested()
        activity = folder / "activity"
        settings = {ACTIVITY: str(activity)} | folder_settings | dict(environment or {})
        killed_before = processes_ended_for_memory()
        job = _Job(_start(command, settings), ranks, activity, start_limit)
        return _follow(job, stop, killed_before, stop_after)


@contextmanager
def _folder_of_job() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield a temporary folder for a job, and the settings by which MPI keeps its files there.

    The ranks' shared memory gets a folder in memory. Both folders are removed after the block.
    """
    bases = (os.environ.get(name) for name in SESSIONS)
    base = next((Path(path) for path in bases if path and Path(path).is_dir()), None)
    with ExitStack() as stack:
        folder = stack.enter_context(files.temporary_folder(base))
        settings = dict.fromkeys(SESSIONS, str(folder))
        if files.SHARED_SETTINGS[0] not in os.environ:
            with suppress(OSError):
                shared = stack.enter_context(files.temporary_folder(files.SHARED_MEMORY))
                settings |= dict.fromkeys(files.SHARED_SETTINGS, str(shared))
        yield folder, settings


def mpirun(ranks: int) -> list[str]:
    """Return the command that starts `ranks` ranks on this machine, even more than it has cores.

    Raises:
        UsageError: if there is no MPI launcher.
    """
    program = own_mpirun() or shutil.which("mpirun") or shutil.which("mpiexec")
    if program is None:
        raise UsageError(
            f"--ranks {ranks} needs MPI, but there is no mpirun in PATH: run hvdtrain setup, "
            "or leave --ranks out to train on one rank"
        )
    try:
        version = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        raise UsageError(f"{program} --version does not answer: run hvdtrain doctor") from None
    if "Open MPI" in version or "OpenRTE" in version:
        return [program, "-np", str(ranks), "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    return [program, "-n", str(ranks)]


def _start(command: Sequence[str], settings: Mapping[str, str]) -> "subprocess.Popen[str]":
    """Start mpirun in a session of its own, with these variables for it and its ranks."""
    return subprocess.Popen(
        command,
        env=_environment() | dict(settings),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


def _environment() -> dict[str, str]:
    """Return the environment without other launchers' variables, and with permission for root."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_VARIABLES)
    }
    kept |= needed_by_mpirun()
    # In a Slurm allocation mpirun would spread the ranks over the nodes, but --ranks is local.
    kept = {"PRTE_MCA_ras": "^slurm", "PRTE_MCA_plm": "ssh"} | kept  # Open MPI 5
    kept = {"OMPI_MCA_ras": "^slurm", "OMPI_MCA_plm": "rsh"} | kept  # Open MPI 4
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    if sys.stdout.isatty():
        kept["HVDTRAIN_TERMINAL_COLUMNS"] = str(shutil.get_terminal_size().columns)
    return kept


def _end_with_parent() -> None:
    """Make the kernel end mpirun, and thereby its ranks, if this launcher is killed.

    Also block SIGTERM and SIGHUP in mpirun. Slurm and systemd send them to every process of the
    job; the ranks save and stop on them, and this launcher forwards them, but mpirun would kill
    the ranks.
    """
    end_with_parent(signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))


def _follow(job: _Job, stop: RanksStop, killed_before: int, stop_after: float | None) -> Outcome:
    """Stream the output of the ranks until they end; print the reason if no rank has.

    Args:
        killed_before: processes on this host that the kernel had killed for memory by their start.
    """
    banners: list[str] = []
    reports: list[str] = []
    source = job.process.stderr
    readers = [
        threading.Thread(target=_stream, args=(source, banners, reports), daemon=True),
        threading.Thread(target=output.forward, args=(job.process.stdout,), daemon=True),
    ]
    for reader in readers:
        reader.start()
    with stop.forwarded_to(job):
        code, stalled, was_due = _wait(job, stop_after)
    for reader in readers:
        reader.join(timeout=5)
    if code and sys.stdout.isatty():
        sys.stdout.write(SHOW_CURSOR)  # a killed rank could not restore it after its progress bar
    code, reason = judge(code, banners, stop, job.activity)
    if stalled:
        code, reason = RankError.exit_code, stalled
    if reason:
        if processes_ended_for_memory() > killed_before:
            reason += "; meanwhile the kernel killed a process on this host for lack of memory"
        print(f"{REPORT_PREFIX}{reason}", file=sys.stderr, flush=True)
    # The message goes into environments, whose variables Linux limits to 128 KiB.
    return Outcome(code, shortened(reason or "".join(reports[-1:])), was_due)


def _wait(job: _Job, stop_after: float | None) -> tuple[int, str, bool]:
    """Wait for mpirun.

    Returns:
        Its exit code, why this launcher ended it (empty if it did not), and whether the ranks were
        requested to stop after their time.
    """
    if job.start_limit is None:
        return job.process.wait(), "", False
    until = math.inf if stop_after is None else time.monotonic() + stop_after
    was_due = False
    watch, reason = Watch(job.activity, range(job.ranks), job.start_limit, WATCH_SECONDS), ""
    while True:
        try:
            seconds = WATCH_SECONDS if not reason else SECONDS_TO_END
            return job.process.wait(timeout=seconds), reason, was_due
        except subprocess.TimeoutExpired:
            if reason:
                job.end(signal.SIGKILL)
            elif stalled := watch.stalled():
                reason = stuck_message(*stalled)
                job.end()
            elif not was_due and time.monotonic() > until and job.handles_requests():
                was_due = True
                job.process.send_signal(signal.SIGUSR1)


def _stream(source: IO[str] | None, banners: list[str], reports: list[str]) -> None:
    """Forward the ranks' standard error, and collect the messages of hvdtrain in `reports`."""
    assert source is not None
    for line in without_launcher_banners(source, banners):
        if line.startswith(REPORT_PREFIX):
            reports.append(line.removeprefix(REPORT_PREFIX).strip())
        elif reports and reports[-1].endswith(":") and re.match(r"(?!Traceback)\w", line):
            reports[-1] += f" {line.strip()}"  # the last line of a traceback below its heading
        sys.stderr.write(line)
        sys.stderr.flush()


def judge(
    code: int, banners: Sequence[str], stop: RanksStop, activity: Path | None = None
) -> tuple[int, str | None]:
    """Return the exit code of a job, and the line to print if no rank has reported the reason.

    Args:
        code: exit code of mpirun.
        banners: mpirun's own remarks.
        stop: the request to stop, and how this launcher ended the ranks.
        activity: file in which the ranks recorded their actions.
    """
    stop_code = Interrupted.exit_code if stop.interrupted else Preempted.exit_code
    could_start = code != HvdtrainError.exit_code or any(
        remark in line for line in banners for remark in REMARKS_ON_A_RANK
    )
    is_by_launcher = bool(stop.ended) and code == Interrupted.exit_code
    if code in REPORTED_BY_A_RANK and could_start and not is_by_launcher:
        # The ranks receive a Ctrl-C as SIGUSR1 and cannot tell it from a preemption.
        return (stop_code if stop.requested and code == Preempted.exit_code else code), None
    if stop.ended:
        return stop_code, stop.ended
    if stop.requested and re.search(BY_STOP_SIGNAL, " ".join(" ".join(banners).split())):
        return stop_code, BEFORE_TRAINING
    return RankError.exit_code, explain(code, banners, activity)


def explain(code: int, banners: Sequence[str], activity: Path | None = None) -> str:
    """Return one line from mpirun's remarks on a job that ended without a report by a rank."""
    text = " ".join(" ".join(banners).split())
    match = re.search(r"process rank (\d+) with PID \d+ on node (\S+) exited on (.*?)\.", text)
    if match:
        doing = last_activity(activity, int(match[1])) if activity else ""
        where = f" in {doing}" if doing else ""
        return (
            f"rank {match[1]} on {match[2]} was ended by {match[3]}{where}; "
            "the job was ended with it; train resumes with --resume"
        )
    reason = f"mpirun ended with {code}: {text or 'it gave no reason'}"
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < FEW_FILES:
        reason += f"; it may open {most} files only: raise ulimit -n"
    return reason
