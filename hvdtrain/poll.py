"""Waiting for other ranks without taking their cores.

MPI and Horovod wait by asking again and again, at best offering the core each time
(sched_yield). Where ranks share cores, that takes them from those that compute; two jobs side by
side were seen to hold each other back for minutes.
"""

import os
import time
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")

SPIN_SECONDS = 1e-3  # most waits are shorter, and none of those shall end late
LONGEST_SLEEP = 1e-3


def wait_until(
    done: Callable[[], Answer],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Answer:
    """Return the first true answer of `done()`: asked again and again, then between sleeps.

    A sleep lasts a tenth of the wait so far, so that a wait ends about a tenth late at most.
    """
    began = clock()
    while not (answer := done()):
        waited = clock() - began
        if waited > SPIN_SECONDS:
            sleep(min(LONGEST_SLEEP, waited / 10))
        else:
            os.sched_yield()
    return answer
