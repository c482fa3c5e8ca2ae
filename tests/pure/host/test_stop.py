"""Several signals are one request to stop, whenever they arrive."""

import contextlib
import signal
import threading
from collections.abc import Iterator

import pytest

from hvdtrain.host.process import SAME_CTRL_C_SECONDS, STOP_SIGNALS, StopRequest


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
