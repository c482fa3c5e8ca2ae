"""Start N ranks on this machine, stream their output, pass on signals, end together.

`hvdtrain train --ranks N` outside a launcher comes here. mpirun runs in a session of its own, so
that Ctrl-C reaches only this process, which passes it on as SIGUSR1: mpirun forwards that to the
ranks, while a SIGTERM or SIGINT of its own would kill them a quarter of a second later.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from typing_extensions import override

from hvdtrain import memory, shared_memory
from hvdtrain.activity import (
    IN_TRAINING,
    WATCH_SECONDS,
    Watch,
    ended_from_outside,
    last_activity,
)
from hvdtrain.errors import Interrupted, Preempted, RankError, UsageError, shortened
from hvdtrain.launchers import own_mpirun
from hvdtrain.stop import StopRequest, end_with_parent

# What a rank ends with on purpose, having said why itself. mpirun ends with 1 too where it could
# not start the ranks, and then says so in a remark that speaks of no process that exited.
REPORTED_BY_A_RANK = frozenset({0, 1, 2, 3, 4, 75, 130})
REMARKS_ON_A_RANK = ("MPI_ABORT was invoked", "non-zero status")
EDGE = "-" * 70
LAUNCHER_WORDS = (
    r"not enough slots|prterun|prted|PRTE|PRRTE|PMIx server|mpirun|MPI_ABORT|Open MPI|open-mpi"
)
# Where mpirun keeps its files, in a folder named by its process number alone: it fails where one
# that was killed left a folder of this number.
SESSIONS = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")  # of Open MPI 5, and 4
VERSION_SECONDS = 20
SECONDS_TO_END = 15.0  # that mpirun may take to end ranks that do not answer
SAID = "hvdtrain: "
SHOW_CURSOR = "\x1b[?25h"
AT_ONCE = "ended at once; the last checkpoint is as it was"
BEFORE_TRAINING = "ended before training began"
# The ranks obey these from their first moments to their last: one of them ends a rank that has not
# begun, or is done.
BY_STOP_SIGNAL = r"signal \d+ \((User defined signal \d|Terminated|Hangup)\)"


@dataclass(frozen=True)
class Outcome:
    """How a job ended: its exit code, and the last line that says why; empty if none does."""

    code: int
    message: str


def run(ranks: int, arguments: Sequence[str]) -> int:
    """As `supervise`; the exit code alone."""
    return supervise(ranks, arguments).code


def supervise(
    ranks: int,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    stop: "RanksStop | None" = None,
    start_limit: float | None = None,
) -> Outcome:
    """Run `hvdtrain ARGUMENTS` on `ranks` ranks of this machine.

    Args:
        environment: of the ranks, beside this process's own.
        stop: signals that are watched already; by default they are while the ranks run.
        start_limit: seconds that anything may take a rank before its first step, and what it notes
            itself after that; None: nobody watches.

    Raises:
        UsageError: if there is no MPI launcher.
        Interrupted, Preempted: if this process was asked to leave before it started the ranks.
    """
    with nullcontext(stop) if stop else RanksStop() as stop:
        return _supervise(ranks, arguments, environment or {}, stop, start_limit)


def _supervise(
    ranks: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stop: "RanksStop",
    start_limit: float | None,
) -> Outcome:
    # -P: no module of the current folder takes the place of one that hvdtrain needs.
    command = [*mpirun(ranks), sys.executable, "-P", "-m", "hvdtrain", *arguments]
    bases = (os.environ.get(name) for name in SESSIONS)
    base = next((path for path in bases if path and Path(path).is_dir()), None)
    with (
        tempfile.TemporaryDirectory("", "hvdtrain-", base, ignore_cleanup_errors=True) as folder,
        _in_memory(Path(folder).name) as shared,
    ):
        own = dict.fromkeys(SESSIONS, folder) | shared | dict(environment)
        stop.raise_if_requested()
        return _run(command, _Ranks(ranks, Path(folder) / "activity", start_limit), own, stop)


@contextmanager
def _in_memory(name: str) -> Iterator[dict[str, str]]:
    """The settings for what ranks share in memory, which goes with all that is left in it."""
    is_set = shared_memory.SETTINGS[0] in os.environ
    folder = None if is_set else shared_memory.claim(name)
    try:
        yield dict.fromkeys(shared_memory.SETTINGS, str(folder)) if folder else {}
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _Ranks:
    """How many ranks there are, and the file in which they note what they do."""

    count: int
    activity: Path
    start_limit: float | None  # seconds that anything may take before the first step

    def have_begun(self) -> bool:
        """Whether any of them has begun to train."""
        lines = (last_activity(self.activity, rank) for rank in range(self.count))
        return any(line.startswith(IN_TRAINING) for line in lines)


def _run(
    command: Sequence[str], ranks: _Ranks, environment: Mapping[str, str], stop: "RanksStop"
) -> Outcome:
    """Run a launcher and its ranks to their end."""
    activity = ranks.activity
    out_of_memory = memory.processes_ended_for_memory()
    process = subprocess.Popen(
        command,
        env=_environment() | {"HVDTRAIN_ACTIVITY": str(activity)} | dict(environment),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    banners: list[str] = []
    said: list[str] = []
    reader = threading.Thread(target=_stream, args=(process.stderr, banners, said), daemon=True)
    reader.start()
    stop.watch(process, ranks)
    code, stalled = _wait(process, ranks)
    stop.process = None
    reader.join(timeout=5)
    if code and sys.stdout.isatty():
        sys.stdout.write(SHOW_CURSOR)  # a rank that was ended could not take its bar away
    code, reason = judge(code, banners, stop, activity)
    if stalled:
        code, reason = RankError.exit_code, stalled
    if reason:
        if memory.processes_ended_for_memory() > out_of_memory:
            reason += "; meanwhile the kernel ended a process here for lack of memory"
        print(f"hvdtrain: {reason}", file=sys.stderr, flush=True)
    # It goes into environments, of which Linux takes no variable above 128 KiB.
    return Outcome(code, shortened(reason or "".join(said[-1:])))


def _wait(process: "subprocess.Popen[str]", ranks: _Ranks) -> tuple[int, str]:
    """The exit code of mpirun, and why this launcher ended it; empty if it did not."""
    if ranks.start_limit is None:
        return process.wait(), ""
    every = range(ranks.count)
    watch, said = Watch(ranks.activity, every, ranks.start_limit, WATCH_SECONDS), ""
    while True:
        try:
            return process.wait(timeout=WATCH_SECONDS if not said else SECONDS_TO_END), said
        except subprocess.TimeoutExpired:
            if said:
                os.killpg(process.pid, signal.SIGKILL)
            elif stalled := watch.stalled():
                said = ended_from_outside(*stalled)
                os.killpg(process.pid, signal.SIGINT)


def _whole_lines(lines: Iterable[str]) -> Iterator[str]:
    """Lines without NULs; a frame's edge begins a line, though a rank had not ended its own."""
    for line in lines:
        line = line.replace("\0", "")
        start = line.find(EDGE)
        if start > 0:
            yield line[:start] + "\n"
            line = line[start:]
        yield line


def judge(
    code: int, banners: Sequence[str], stop: "RanksStop", activity: Path | None = None
) -> tuple[int, str | None]:
    """The exit code of a job, and the line to print where no rank has said why it ended.

    Args:
        code: what mpirun ended with.
        banners: what mpirun said itself.
        stop: whether this launcher was asked to end, and how it ended the ranks.
        activity: where the ranks noted what they did.
    """
    asked = Interrupted.exit_code if stop.interrupted else Preempted.exit_code
    is_reported = code != 1 or any(
        remark in line for line in banners for remark in REMARKS_ON_A_RANK
    )
    if (
        code in REPORTED_BY_A_RANK
        and is_reported
        and not (stop.ended and code == Interrupted.exit_code)
    ):
        # To the ranks a Ctrl-C is a SIGUSR1 as any other.
        return (asked if stop.requested and code == Preempted.exit_code else code), None
    if stop.ended:
        return asked, stop.ended
    if stop.requested and re.search(BY_STOP_SIGNAL, " ".join(" ".join(banners).split())):
        return asked, BEFORE_TRAINING
    return RankError.exit_code, explain(code, banners, activity)


def mpirun(ranks: int) -> list[str]:
    """The command that starts `ranks` ranks on this machine, more than it has cores if asked.

    Raises:
        UsageError: if there is no MPI launcher.
    """
    program = own_mpirun() or shutil.which("mpirun") or shutil.which("mpiexec")
    if program is None:
        raise UsageError(
            f"--ranks {ranks} needs MPI, and there is no mpirun here: run make setup, "
            "or train with one rank (leave --ranks out)"
        )
    try:
        version = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        raise UsageError(f"{program} does not answer: hvdtrain doctor says more") from None
    if "Open MPI" in version or "OpenRTE" in version:
        return [program, "-np", str(ranks), "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    return [program, "-n", str(ranks)]


def without_launcher_banners(lines: Iterable[str], banners: list[str]) -> Iterator[str]:
    """Pass on what the ranks wrote; collect mpirun's own framed remarks in `banners`."""
    frame: list[str] = []
    for line in _whole_lines(lines):
        is_edge = line.startswith(EDGE)
        if not frame and not is_edge:
            if not re.match(r"\[[^\]]+\] PMIX ERROR", line):
                yield line
            continue
        frame.append(line)
        if is_edge and len(frame) > 1:
            if re.search(LAUNCHER_WORDS, " ".join(" ".join(frame).split())):
                banners += [inner.rstrip("\n") for inner in frame[1:-1]]
            else:
                yield from frame
            frame = []
    yield from frame


def explain(code: int, banners: Sequence[str], activity: Path | None = None) -> str:
    """One line from mpirun's remarks on a job that ended without a word from a rank."""
    text = " ".join(" ".join(banners).split())
    ended = re.search(r"process rank (\d+) with PID \d+ on node (\S+) exited on (.*?)\.", text)
    if ended:
        doing = last_activity(activity, int(ended[1])) if activity else ""
        where = f" in {doing}" if doing else ""
        return (
            f"rank {ended[1]} on {ended[2]} was ended by {ended[3]}{where}; "
            "the job was ended with it"
        )
    return f"mpirun ended with {code}: {text or 'it gave no reason'}"


class RanksStop(StopRequest):
    """A request to leave that reaches the ranks, once, however many signals it comes in.

    Attributes:
        process: mpirun, while it runs.
        ended: how this launcher ended the ranks itself; empty if it did not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.process: subprocess.Popen[str] | None = None
        self.ranks: _Ranks | None = None
        self.ended = ""

    def watch(self, process: "subprocess.Popen[str]", ranks: _Ranks) -> None:
        """From now on requests are for these ranks; also one that came while they started."""
        self.process, self.ranks = process, ranks
        if self.requested and not self.ended:
            self.on_request()

    @override
    def on_request(self) -> None:
        if self.process is None or self.ranks is None:
            if self.interrupted:
                raise KeyboardInterrupt  # no rank has to be waited for
            return
        if self.ranks.start_limit is None or self.ranks.have_begun():  # None: not a training
            self.process.send_signal(signal.SIGUSR1)
        else:  # libraries load for longer than some schedulers wait, and nothing can be lost yet
            self._end(BEFORE_TRAINING)

    @override
    def on_second_ctrl_c(self) -> None:
        if self.process is None:
            raise KeyboardInterrupt
        self._end(AT_ONCE)

    def _end(self, how: str) -> None:
        assert self.process is not None
        self.ended = self.ended or how
        os.killpg(self.process.pid, signal.SIGINT)

    def raise_if_requested(self) -> None:
        """End the command if it was asked to leave while no rank ran.

        Raises:
            Interrupted, Preempted: if so.
        """
        if self.requested:
            raise (Interrupted if self.interrupted else Preempted)(BEFORE_TRAINING)


def _stream(source: IO[str] | None, banners: list[str], said: list[str]) -> None:
    """Pass on what the ranks write to standard error; collect the lines of hvdtrain's own."""
    assert source is not None
    for line in without_launcher_banners(source, banners):
        if line.startswith(SAID):
            said.append(line.removeprefix(SAID).strip())
        elif said and said[-1].endswith(":") and re.match(r"(?!Traceback)\w", line):
            said[-1] += f" {line.strip()}"  # the last line of a traceback below its heading
        sys.stderr.write(line)
        sys.stderr.flush()


def _environment() -> dict[str, str]:
    """This process's environment, without what another launcher left and with leave to be root."""
    inherited = ("OMPI_COMM_WORLD_", "PMIX_", "PRTE_", "PMI_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(inherited)}
    kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # In a Slurm allocation mpirun would spread the ranks over its nodes: --ranks is this machine.
    kept = {"PRTE_MCA_ras": "^slurm", "PRTE_MCA_plm": "ssh"} | kept  # Open MPI 5
    kept = {"OMPI_MCA_ras": "^slurm", "OMPI_MCA_plm": "rsh"} | kept  # Open MPI 4
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    if sys.stdout.isatty():
        kept["HVDTRAIN_TERMINAL_COLUMNS"] = str(shutil.get_terminal_size().columns)
    return kept


def _end_with_parent() -> None:
    """If this launcher is killed, the kernel ends mpirun, and mpirun its ranks.

    SIGTERM and SIGHUP are for the ranks, which save and leave, and for this launcher, which tells
    them: Slurm and systemd send them to every process of the job, and mpirun would kill the ranks.
    """
    end_with_parent(signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))
