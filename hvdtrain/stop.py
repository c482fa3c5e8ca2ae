"""The request to leave: Ctrl-C, or a signal of the scheduler. Nothing here loads torch."""

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

# What schedulers, service managers and terminals that close send. Several of them are one request:
# systemd sends SIGTERM and SIGHUP, Slurm SIGUSR1 before the time is up and SIGTERM at its end.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# `timeout` and other wrappers deliver one Ctrl-C twice, within milliseconds.
SAME_CTRL_C_SECONDS = 0.5
PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


class StopRequest:
    """Whether this process has been asked to leave, from entering the context to leaving it.

    The first signal decides between `interrupted` and `preempted`, and is obeyed at the next step;
    only a second Ctrl-C ends at once.
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
        """Whether this process has been asked to leave."""
        return self.interrupted or self.preempted

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *STOP_SIGNALS):
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup: the end of the terminal is not the end of the run
                self._previous[number] = signal.signal(number, self._take)
            # Job scripts block them until there is a handler; what came meanwhile comes now.
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
        """Called once, at the first signal."""

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
