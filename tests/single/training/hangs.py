"""Where a rank of a test hangs: in a call of the system that does not come back, or stopped."""

import atexit
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.training.feed import Feed, Feeder
from hvdtrain.training.heartbeat import Heartbeat

BATCHES = 4  # that a rank reads before it hangs in its loader


def leave_mark() -> None:
    """For the test to know when the rank began to hang."""
    Path(os.environ["HUNG"]).touch()


def wait_for_a_disk() -> None:
    """Read what nobody writes."""
    leave_mark()
    reads, _ = os.pipe()
    os.read(reads, 1)


def stop() -> None:
    """As SIGSTOP from elsewhere: none of its threads goes on."""
    leave_mark()
    os.kill(os.getpid(), signal.SIGSTOP)


def in_the_loader() -> None:
    """The loader's thread, once training goes on."""
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
    """The thread that writes checkpoints, before the data is on the disk."""
    sync = os.fsync

    def hang_or_sync(file: Any) -> None:
        if threading.current_thread().name == "hvdtrain-checkpoint":
            wait_for_a_disk()
        sync(file)

    os.fsync = hang_or_sync  # type: ignore[assignment]


def in_restoring() -> None:
    """The first look at a part of a checkpoint."""
    os.posix_fadvise = lambda *_: wait_for_a_disk()


def before_the_end() -> None:
    """Stopped when all is trained, before the ranks leave together."""
    Heartbeat.close = lambda self: stop()  # type: ignore[method-assign]


ARRANGE: dict[str, Callable[[], object]] = {
    "loader": in_the_loader,
    "writing": in_writing,
    "restoring": in_restoring,
    "before the end": before_the_end,
    "stopped at exit": lambda: atexit.register(stop),
    "waiting at exit": lambda: atexit.register(wait_for_a_disk),
}
