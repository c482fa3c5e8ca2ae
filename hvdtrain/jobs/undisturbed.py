"""Submit jobs from one process at a time, and record each job number even after a Ctrl-C."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hvdtrain.errors import DataError
from hvdtrain.files import OWN_FOLDER, make_folders
from hvdtrain.ownership import alone

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
