"""The dilated clock of an emulation: a modelled second takes `dilation` real seconds.

Time stamps of two processes of one host may be compared: both read CLOCK_MONOTONIC.
"""

import time
from collections.abc import Callable


class Clock:
    """Lets modelled seconds pass by sleeping.

    A sleep ends late: the timer is not exact, and the cores may be busy with other ranks. What
    follows is shortened by the same time, so that such delays do not add up.

    Args:
        dilation: real seconds per modelled second.
        now: returns real seconds.
        sleep: lets real seconds pass.

    Attributes:
        slept: real seconds of `work` so far.
        late: real seconds by which this rank is behind the modelled device.
    """

    def __init__(
        self,
        dilation: float,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.dilation, self.now, self._sleep = dilation, now, sleep
        self.slept = self.late = 0.0

    def modelled_now(self) -> float:
        """Return the real time at which the modelled device has reached this point."""
        return self.now() - self.late

    def until(self, deadline: float) -> None:
        """Sleep until a real time, if the modelled device reaches it later than now."""
        if self.modelled_now() >= deadline:
            return
        left = deadline - self.now()
        if left > 0:
            self._sleep(left)
        self.late = max(0.0, self.now() - deadline)

    def work(self, seconds: float) -> None:
        """Let modelled seconds pass."""
        self.until(self.modelled_now() + self.dilation * seconds)
        self.slept += self.dilation * seconds
