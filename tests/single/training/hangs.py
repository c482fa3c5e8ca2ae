"""Hangs of a rank in tests: in a system call that does not return, or stopped."""

import atexit
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.engine.feed import Feed, Feeder
from hvdtrain.engine.progress import Control
from hvdtrain.engine.session import StepOutcome
from hvdtrain.health.heartbeat import Heartbeat

BATCHES = 4  # read by a rank before it hangs in its loader
STEPS = 3  # of a run with `--max-steps 3`


def leave_mark() -> None:
    """Tell the test that the rank starts to hang."""
    Path(os.environ["HUNG"]).touch()


def wait_for_a_disk() -> None:
    """Read from a pipe that nobody writes to."""
    leave_mark()
    reads, _ = os.pipe()
    os.read(reads, 1)


def stop() -> None:
    """Stop all threads of the process, as SIGSTOP from another process does."""
    leave_mark()
    os.kill(os.getpid(), signal.SIGSTOP)


def in_the_loader() -> None:
    """Hang in the loader's thread, after a few batches."""
    read = 0
    gather = Feeder.gather

    def gather_or_hang(self: Feeder, request: Any) -> Feed:
        nonlocal read
        read += 1
        if read > BATCHES:
            wait_for_a_disk()
        return gather(self, request)

    Feeder.gather = gather_or_hang  # type: ignore[method-assign]


def in_writing() -> None:
    """Hang in the thread that writes checkpoints, before the data is on the disk."""
    sync = os.fsync

    def hang_or_sync(file: Any) -> None:
        if threading.current_thread().name == "hvdtrain-checkpoint":
            wait_for_a_disk()
        sync(file)

    os.fsync = hang_or_sync  # type: ignore[assignment]


def in_restoring() -> None:
    """Hang at the first read of a checkpoint file."""
    os.posix_fadvise = lambda *_: wait_for_a_disk()


def after_the_last_step() -> None:
    """Stop before sending the control vector of the last step, for which all others wait."""
    sent = 0
    send = Control._send

    def send_or_stop(self: Control) -> StepOutcome:
        nonlocal sent
        sent += 1
        if sent == STEPS:
            stop()
        return send(self)

    Control._send = send_or_stop  # type: ignore[method-assign]


def before_the_end() -> None:
    """Stop when training is over, before the ranks leave together."""
    Heartbeat.close = lambda self: stop()  # type: ignore[method-assign]


ARRANGE: dict[str, Callable[[], object]] = {
    "loader": in_the_loader,
    "writing": in_writing,
    "restoring": in_restoring,
    "after the last step": after_the_last_step,
    "before the end": before_the_end,
    "stopped at exit": lambda: atexit.register(stop),
    "waiting at exit": lambda: atexit.register(wait_for_a_disk),
}
