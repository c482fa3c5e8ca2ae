"""The program of a job: `python -m hvdtrain.jobs.task rank RUN`, or `... runs RUN...`.

The arguments are run folders. A job executes what `config.yaml` in such a folder says, so a folder
that another user could have changed since the submission is refused.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files
from hvdtrain.host.files import OWN_FOLDER, make_folders
from hvdtrain.host.ownership import alone
from hvdtrain.host.stop import STOP_SIGNALS

CONFIGURATION = "config.yaml"


def main(words: Sequence[str]) -> int:
    """Run this task; return the exit code."""
    mode, *runs = words
    try:
        if mode == "rank":
            exec_train(runs[0])
        return train_in_turn(runs)
    except (DataError, UsageError) as error:
        print(f"hvdtrain: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def exec_train(run: str) -> NoReturn:
    """Replace this process by `hvdtrain train`, so that every launcher runs the same program.

    Raises:
        DataError, UsageError: as `check`.
    """
    # Blocked and pending signals survive exec, so a signal waits until `train` can handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    os.execv(sys.executable, _command(run))


def train_in_turn(runs: Sequence[str]) -> int:
    """Train these runs one after the other; return the worst exit code.

    Stop signals, such as the one at the end of the job's time, are forwarded to the run.

    Raises:
        DataError, UsageError: as `check`.
    """
    running: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        for process in running:
            process.send_signal(number)

    for number in (*STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, forward)
    codes = []
    for run in runs:
        running[:] = [subprocess.Popen(_command(run))]
        if received:  # before the process had started
            running[0].send_signal(received[0])
        codes.append(running[0].wait())
        if received or codes[-1] in (75, 130):
            break
    return max(codes, key=abs)


def check(run: Path) -> None:
    """Refuse the folder of a run if another user may have written its configuration.

    Raises:
        UsageError: if another user can change the folder or its configuration.
        DataError: if one of them does not exist.
    """
    for path in (run, run / CONFIGURATION):
        try:
            fault = files.ownership_problem(path)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}: submit the run again") from None
        if fault:
            raise UsageError(f"{fault}; a job executes what {CONFIGURATION} says")


def _command(run: str) -> list[str]:
    """Return the command of a run, which is the same after each requeue of its job."""
    check(Path(run))
    configuration = str(Path(run) / CONFIGURATION)
    words = ["train", "--config", configuration, "--run", run, "--resume", "auto"]
    return [sys.executable, "-P", "-m", "hvdtrain", *words]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


LOCK = ".submitting.lock"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def submission_lock(folder: Path) -> Iterator[None]:
    """Be the only process that submits jobs for runs in a folder; wait for any other one.

    Raises:
        DataError: if the folder cannot be written to.
    """
    try:
        make_folders(folder, OWN_FOLDER)
        with alone(folder / LOCK, _say):
            yield
    except OSError as error:
        raise DataError(f"{folder} cannot be written to: {error.strerror}") from None


@contextmanager
def defer_signals() -> Iterator[list[int]]:
    """Defer signals that would end this process; yield a list that grows as they arrive."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if not received:
            _say("stopping once Slurm has answered, so that no job is lost")
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    held = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in held:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number in held:
            signal.signal(number, before[number])


@contextmanager
def children_ignore_signals() -> Iterator[None]:
    """Start programs with these signals blocked: a terminal sends Ctrl-C to all its programs."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _say(line: str) -> None:
    # Not sys.stderr, which is redirected while submitit runs.
    print(f"hvdtrain: {line}", file=sys.__stderr__, flush=True)
