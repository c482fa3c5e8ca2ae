"""The wish to leave: Ctrl-C, or a signal of the scheduler. Nothing here loads torch."""

import signal
import threading
from types import FrameType
from typing import Any, Self


class StopRequest:
    """Whether this process has been asked to leave, from entering the context to leaving it.

    The first signal is remembered and obeyed at the next step; a second Ctrl-C ends at once.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self.preempted = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                self._previous[number] = signal.signal(number, self._preempt)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def _preempt(self, number: int, frame: FrameType | None) -> None:
        self.preempted = True
