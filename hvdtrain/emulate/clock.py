"""The dilated clock of an emulation: a modelled second takes `dilation` real seconds.

Time stamps of two processes of one host may be compared: both read CLOCK_MONOTONIC.
"""

import time
from collections.abc import Callable


class Clock:
    """Lets modelled seconds pass by sleeping.

    A sleep ends late: the timer is not exact, and the cores may be busy with other ranks. What
    follows the sleep at once is shortened by the same time, so that such delays do not add up.

    Args:
        dilation: real seconds per modelled second.
        now: returns real seconds.
        sleep: lets real seconds pass.

    Attributes:
        slept: real seconds of `work` so far.
        late: real seconds by which the last sleep ended late, until `start` takes them back.
    """

    def __init__(
        self,
        dilation: float,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.dilation, self.now, self._sleep = dilation, now, sleep
        self.slept = self.late = 0.0

    def start(self) -> float:
        """Return the real time at which work starts that follows the last sleep."""
        start, self.late = self.now() - self.late, 0.0
        return start

    def until(self, deadline: float) -> None:
        """Sleep until a real time, if it is in the future."""
        left = deadline - self.now()
        if left > 0:
            self._sleep(left)
            self.late = max(0.0, self.now() - deadline)

    def work(self, seconds: float) -> None:
        """Let modelled seconds pass."""
        start = self.start()
        end = start + self.dilation * seconds
        self.until(end)
        self.slept += self.dilation * seconds
