"""The end of a job after a failure: one rank reports the error and ends all the others.

The limits of --stall-timeout, which end a job in which a rank hangs, are here too, and the message
about a bad step.
"""

import contextlib
import errno
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn

from hvdtrain.config import TrainConfig
from hvdtrain.errors import (
    EXIT_INTERNAL,
    HvdtrainError,
    Interrupted,
    RankError,
    UsageError,
    on_one_line,
)
from hvdtrain.host import alert
from hvdtrain.host.activity import START_FACTOR, stuck
from hvdtrain.host.launchers import TORCHRUN, Launch, detect
from hvdtrain.world import activity_path, current, import_mpi

# A rank that is not the first to fail waits this long and prints nothing, so that the message of
# the first one is printed before the job ends.
SECONDS_TO_BE_ENDED = 5.0
SECONDS_TO_JOIN = 20
# Texts of gloo about a rank that has gone. Its launcher names that rank and ends the others.
LOST = ("connection closed by peer", "connection reset by peer")
# Texts of the frameworks' out-of-memory errors, which have no class of their own on CPU and GPU.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "oom when allocating",
)

# Errors of the operating system that only the user can fix.
CURES = {
    errno.ENAMETOOLONG: "use names of at most 255 bytes, in paths of at most 4,095",
    errno.EMFILE: "raise ulimit -n",
}

_ALONE = (("RANK", 0), ("SIZE", 1))
_first_failure: socket.socket | None = None
_recorder: Callable[[BaseException, str], None] | None = None


def end_all_on_exception() -> None:
    """Make every uncaught exception end the job on all ranks from this call on.

    Without this, a rank that raises in a user's own script would wait for the other ranks in MPI's
    finalisation, while they wait for it.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        fail(error)

    sys.excepthook = hook


def record_with(recorder: Callable[[BaseException, str], None]) -> None:
    """Pass the error that ends the job, with its text, to a function, and print nothing."""
    global _recorder
    _recorder = recorder


@dataclass(frozen=True)
class Listener:
    """The receiver of the alert that a job failed: a shell command, and the run folder."""

    command: str | None
    run: str | None


def fail(error: BaseException, listener: Listener | None = None) -> NoReturn:
    """Report what went wrong, once per node, and end the job on all ranks.

    An error that the user can fix is reported in one line, any other with this rank's traceback.
    Ranks alert the `listener` only if another launcher started them: hvdtrain's own launcher sends
    the alert itself.
    """
    launch = _detect_quietly()
    if _is_lost(error, launch):
        time.sleep(SECONDS_TO_BE_ENDED)
    code, text = _verdict(error, launch)
    if _recorder is not None:
        first = launch.size == 1 or _is_first_to_fail(launch.job)
        if first:
            _recorder(error, text)
    else:
        first = report(text, launch, listener if code != Interrupted.exit_code else None)
    if launch.size == 1:
        if threading.current_thread() is not threading.main_thread():
            os._exit(code)  # a watchdog's exit would end its thread alone
        sys.exit(code)
    if launch.launcher == "srun" and not _is_mpi_running():
        _join_to_end(launch)
    elif not first or not (_is_mpi_running() or launch.launcher == TORCHRUN):
        # Without MPI nothing ends the others, but for torchrun, which does when the first one has
        # ended. The first rank stays, so that no later one reports.
        time.sleep(SECONDS_TO_BE_ENDED)
    if _is_mpi_running():
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)
    os._exit(code)


def report(text: str, launch: Launch, listener: Listener | None) -> bool:
    """Print why a job ends; return False if another of its processes on this node already did.

    Ranks alert the `listener` only if another launcher than hvdtrain's own started them.
    """
    if launch.size != 1 and not _is_first_to_fail(launch.job):
        return False
    sys.stdout.flush()
    # In one write, or the launcher's own output comes before the end of the line.
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    if listener is not None and activity_path() is None:
        line = text.splitlines()[-1].removeprefix("hvdtrain: ")
        alert.send_and_wait(listener.command, "job failed", line, listener.run)
    return True


def _verdict(error: BaseException, launch: Launch) -> tuple[int, str]:
    """Return the exit code for an error, and the text to print."""
    alone, where = launch.size == 1, f"rank {launch.rank} on {socket.gethostname()}"
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.exit_code, "hvdtrain: interrupted"
    if isinstance(error, HvdtrainError):
        return error.exit_code, f"hvdtrain: {error}"
    if isinstance(error, OSError) and (cure := CURES.get(error.errno or 0)):
        name = f"{on_one_line(error.filename)}: " if error.filename else ""
        # Ranks may run out of files in the middle of a run, which can then be started again.
        is_late = error.errno == errno.EMFILE and not alone
        code = RankError.exit_code if is_late else UsageError.exit_code
        return code, f"hvdtrain: {name}{error.strerror}: {cure}"
    if _is_lost(error, launch):
        return RankError.exit_code, f"hvdtrain: {where}: the connection to another rank is lost"
    message = str(error).lower()
    if isinstance(error, MemoryError) or any(words in message for words in OUT_OF_MEMORY):
        doing = "; ".join(getattr(error, "__notes__", []))
        lines = [*str(error).splitlines(), "no details are known"]
        reason = re.sub(r"^\[enforce fail.*?\] err == 0\. ", "", lines[0])
        return RankError.exit_code, (
            f"hvdtrain: {where} is out of memory{f' ({doing})' if doing else ''}: {reason}; use a "
            "smaller --batch-size, more --microbatches, --recompute, or fewer ranks on a host"
        )
    code = EXIT_INTERNAL if alone else RankError.exit_code
    heading = "" if alone else f"hvdtrain: {where}:\n"
    return code, heading + "".join(traceback.format_exception(error)).rstrip()


def _is_lost(error: BaseException, launch: Launch) -> bool:
    """Return whether gloo raised this because another rank has gone."""
    if launch.size == 1:
        return False
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in LOST)


def _detect_quietly() -> Launch:
    """Return what `detect` does, also for a launch that `detect` refuses."""
    try:
        return detect(os.environ)
    except UsageError:
        job = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", str(os.getppid()))
        rank, size = (int(os.environ.get(f"HOROVOD_{name}", n)) for name, n in _ALONE)
        return Launch("horovodrun", rank, size, job)


def _is_mpi_running() -> bool:
    """Return whether MPI connects other ranks: a failed launch leaves each rank a world of one."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return False
    return bool(mpi.COMM_WORLD.size > 1)


def _join_to_end(launch: Launch) -> None:
    """Start MPI in order to end the other ranks, which otherwise hang in MPI_Init under srun.

    If MPI cannot start, wait until the others have failed too: only one rank per node reports.
    """
    if "PMIX_RANK" in os.environ:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS_TO_JOIN)  # MPI_Init waits for all, and some may have left
        with contextlib.suppress(UsageError):
            import_mpi(launch, "auto")
        signal.alarm(0)
    if not _is_mpi_running():
        time.sleep(SECONDS_TO_BE_ENDED)


def _is_first_to_fail(job: str) -> bool:
    """Return True on one rank of the node only, or on all if the system has no mark for it.

    hvdtrain's own launcher and mpirun have a folder for the job, in which a file can be created
    once. Elsewhere a name in the abstract socket namespace has one owner. The name lives as long
    as the process, so nothing is left behind, but a rank that fails after that process has ended
    reports too.
    """
    global _first_failure
    if mark := _mark_of_failure():
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True  # two reports are better than none
        return True
    _first_failure = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        _first_failure.bind(f"\0hvdtrain-failed-{os.getuid()}-{job}")
    except OSError as error:
        return error.errno != errno.EADDRINUSE  # other systems than Linux have no such names
    return True


def _mark_of_failure() -> Path | None:
    """Return a file in the job's folder on this node, which the launcher removes at the end."""
    if activity := activity_path():
        return activity.with_name("failed")
    folder, job = (os.environ.get(name) for name in ("PMIX_SERVER_TMPDIR", "PMIX_NAMESPACE"))
    if folder and job and "SLURM_STEP_ID" not in os.environ and Path(folder).is_dir():
        return Path(folder, f"hvdtrain-failed-{job}")
    return None


def patience(config: TrainConfig) -> float:
    """Return the seconds that an action may take, including the compilation of components."""
    return config.stall_timeout * (10 if config.compile else 1)


def start_patience(config: TrainConfig) -> float:
    """Return the seconds that an action before the first step may take.

    `--stage` may copy for hours.
    """
    return patience(config) * START_FACTOR * (10 if config.stage else 1)


def stalled(line: str, suspects: str = "", listener: Listener | None = None) -> None:
    """End the job from the watchdog's thread.

    Args:
        suspects: the ranks that this one may be waiting for, if they are known.
    """
    advice = suspects or "check the ranks or the disk it waits for, or raise --stall-timeout"
    fail(RankError(f"{stuck(current().rank, line)}: {advice}"), listener)


class Sighting(NamedTuple):
    """A component whose output was not finite; `place` is its position in the model."""

    place: int
    component: str
    rank: int
    has_bad_weights: bool


def bad_step_words(
    seen: Sequence[Sighting], norms: Mapping[str, float], places: Mapping[str, int]
) -> str:
    """Return which component went wrong first.

    The forward pass goes wrong first in the first bad component of the model, the backward pass
    in the last.

    Args:
        seen: the components whose output was not finite.
        norms: norm of the gradients, by component.
        places: position in the model, by component.
    """
    if seen:
        first = min(seen)
        why = (
            "its weights are not finite either"
            if first.has_bad_weights
            else "its input and weights are finite"
        )
        return f"{first.component} is the first component whose output is not finite ({why})"
    bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if bad:
        last = max(bad, key=lambda name: places[name])
        return f"all outputs are finite, but the gradient of {last}, the first in backward, is not"
    largest = max(norms, key=lambda name: norms[name])
    return (
        f"in a repetition the norm of all gradients is {math.hypot(*norms.values()):.3g}, "
        f"and {largest} has the largest ({norms[largest]:.3g})"
    )
