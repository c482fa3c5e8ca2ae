"""The request to stop: Ctrl-C, or a signal of the scheduler. Nothing here loads torch."""

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

# Signals of schedulers, service managers and closing terminals. Several of them are one request:
# systemd sends SIGTERM and SIGHUP, Slurm sends SIGUSR1 before the time limit and SIGTERM at it.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# `timeout` and other wrappers deliver one Ctrl-C twice, within milliseconds.
SAME_CTRL_C_SECONDS = 0.5
PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def suspend_with(pid: int) -> None:
    """Suspend this process, as Ctrl-Z does, and with it those that a launcher has started.

    The launcher itself runs on: it ends them if this process is killed meanwhile. One that it
    starts only now runs until it waits for the others.
    """
    import psutil

    others: list[psutil.Process] = []
    with suppress(psutil.Error):
        others = psutil.Process(pid).children(recursive=True)
    for process in others:
        with suppress(psutil.Error):
            process.suspend()
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTSTP)  # returns once this process continues
    signal.signal(signal.SIGTSTP, handler)
    for process in others:
        with suppress(psutil.Error):
            process.resume()


class StopRequest:
    """A context manager that records whether this process was requested to stop.

    The first signal decides between `interrupted` and `preempted` and takes effect at the next
    step; only a second Ctrl-C ends the process at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.interrupted = False
        self.preempted = False
        self._pressed_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._mask: set[Any] | None = None

    @property
    def requested(self) -> bool:
        """True if this process was requested to stop."""
        return self.interrupted or self.preempted

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *STOP_SIGNALS):
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup: the run continues after the terminal closes
                self._previous[number] = signal.signal(number, self._take)
            # Job scripts block the signals until there is a handler; pending ones arrive now.
            self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, list(self._previous))
        return self

    def __exit__(self, *error: object) -> None:
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self._mask = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def on_request(self) -> None:
        """Do nothing; subclasses override this, which is called once, at the first signal."""

    def on_second_ctrl_c(self) -> None:
        """End at once.

        Raises:
            KeyboardInterrupt: always.
        """
        raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.requested
        if is_first:
            self.interrupted = number == signal.SIGINT
            self.preempted = not self.interrupted
        if number == signal.SIGINT:
            now = self.clock()
            if self._pressed_at is None:
                self._pressed_at = now
            elif now - self._pressed_at > SAME_CTRL_C_SECONDS:
                self.on_second_ctrl_c()
        if is_first:
            self.on_request()
