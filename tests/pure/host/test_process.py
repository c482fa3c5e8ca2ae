"""Several signals are one request to stop, whenever they arrive."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.host import process
from hvdtrain.host.process import (
    LONGEST_SLEEP,
    SAME_CTRL_C_SECONDS,
    SPIN_SECONDS,
    STOP_SIGNALS,
    StopRequest,
    wait_until,
)
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """Restore the test process's signal handlers, also after a failed test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *STOP_SIGNALS)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    yield
    while signal.sigtimedwait(STOP_SIGNALS, 0):
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGTERM, signal.SIGHUP),  # systemd
        (signal.SIGUSR1, signal.SIGTERM),  # Slurm, at the end of the time
        (signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM, signal.SIGINT),
    ],
)
def test_signals_of_a_scheduler_are_one_request(numbers: tuple[signal.Signals, ...]) -> None:
    with StopRequest() as stop:
        for number in numbers:
            signal.raise_signal(number)
        assert (stop.preempted, stop.interrupted) == (True, False)


def test_a_ctrl_c_that_a_wrapper_delivers_twice_is_one() -> None:
    """`timeout -s INT` sends the signal to the program and to its group."""
    now = 100.0
    with StopRequest(clock=lambda: now) as stop:
        signal.raise_signal(signal.SIGINT)
        now += SAME_CTRL_C_SECONDS
        signal.raise_signal(signal.SIGINT)
        assert stop.interrupted
        now += 0.1  # a user presses Ctrl-C again
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_that_was_blocked_until_there_is_a_handler_is_not_lost() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    signal.raise_signal(signal.SIGTERM)  # to this thread: other threads do not block it
    with StopRequest() as stop:
        assert stop.preempted
    assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.requested


def test_a_thread_of_a_user_watches_no_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def enter() -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(StopRequest())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


# Binds itself after a thread has started, and prints the cores of both threads.
PROGRAM = """
import os, sys, threading
from hvdtrain.host import process
event, done = threading.Event(), []
def wait():
    event.wait()
    done.append(sorted(os.sched_getaffinity(0)))
thread = threading.Thread(target=wait)
thread.start()
process.bind(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
event.set()
thread.join()
print(done[0], sorted(os.sched_getaffinity(0)))
"""


def bound(place: int, sharing: int, threads: int) -> list[int]:
    words = [sys.executable, "-c", PROGRAM, *map(str, (place, sharing, threads))]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    other, this = done.stdout.strip().split("] [")
    assert f"{other.lstrip('[')}]" == this, "a thread that ran before has other cores"
    return [int(word) for word in this.rstrip("]").split(",")]


def test_each_process_gets_cores_of_its_own() -> None:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) == 1:
        assert bound(0, 1, 1) == usable
        return
    first, second = bound(0, 2, 1), bound(1, 2, 1)
    assert len(first) == len(second) == 1 and first != second
    assert bound(0, 1, 2) == sorted(process.physical_first(usable)[:2])


def test_more_threads_than_cores_are_refused() -> None:
    most = len(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    with pytest.raises(
        UsageError, match=rf"{most + 1} rank\(s\) x 1 thread\(s\) share {most} core"
    ):
        process.bind(0, most + 1, 1)
    assert os.sched_getaffinity(0) == before


def test_each_physical_core_is_used_before_any_is_used_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SIBLINGS", str(tmp_path / "{}"))
    for core, text in enumerate(("0,4\n", "1,5\n", "2-3\n", "2-3\n", "0,4\n", "1,5\n")):
        (tmp_path / str(core)).write_text(text)
    assert process.physical_first(range(6)) == [0, 1, 2, 3, 4, 5]
    assert process.physical_first([0, 2, 3, 4]) == [0, 2, 3, 4]
    assert process.physical_first([2, 3, 4, 5]) == [2, 4, 5, 3]
    assert process.physical_first([8, 9]) == [8, 9]  # nothing is known of these


def test_a_later_run_of_the_process_may_use_all_cores_again() -> None:
    program = (
        "import os; from hvdtrain import world; before = os.sched_getaffinity(0); "
        "world.start(threads=1, bind=True); bound = os.sched_getaffinity(0); world.stop(); "
        "print(len(bound) == 1 and os.sched_getaffinity(0) == before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "True\n", done.stderr


POLL_SECONDS = 1e-6


class Wait:
    """A wait of `seconds` by a clock that advances with each poll and each sleep."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.polls = seconds, 0.0, 0
        self.sleeps: list[float] = []

    def done(self) -> bool:
        """Return whether the wait is over."""
        self.polls += 1
        self.now += POLL_SECONDS
        return self.now > self.seconds

    def sleep(self, seconds: float) -> None:
        """Advance the clock, and record the sleep."""
        self.sleeps.append(seconds)
        self.now += seconds


def waited(seconds: float) -> Wait:
    wait = Wait(seconds)
    assert wait_until(wait.done, lambda: wait.now, wait.sleep) is True
    return wait


def test_a_wait_that_is_over_asks_once() -> None:
    wait = waited(0.0)
    assert (wait.polls, wait.sleeps) == (1, [])


def test_a_short_wait_does_not_sleep() -> None:
    assert waited(0.9 * SPIN_SECONDS).sleeps == []


@pytest.mark.proves("Ranks that wait sleep and leave their cores to others.")
@pytest.mark.parametrize("seconds", [0.0012, 0.003, 0.05, 2.0])
def test_a_long_wait_sleeps_and_ends_soon_after(seconds: float) -> None:
    wait = waited(seconds)
    # All but the first millisecond is slept, apart from the polls between the sleeps.
    assert sum(wait.sleeps) > 0.98 * (seconds - SPIN_SECONDS)
    assert max(wait.sleeps) <= LONGEST_SLEEP
    assert wait.now < 1.1 * seconds + POLL_SECONDS
