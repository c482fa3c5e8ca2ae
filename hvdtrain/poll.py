"""Waiting for other ranks without taking their cores.

MPI and Horovod wait by asking again and again, at best offering the core each time
(sched_yield). Where ranks share cores, that takes them from those that compute, and a kernel
that favours who yields most (Linux 6.18 was seen to) can hold another job back for minutes.
"""

import os
import time
from collections.abc import Callable

SPIN_SECONDS = 1e-3  # most waits are shorter, and none of those shall end late
LONGEST_SLEEP = 1e-3


def wait_until(done: Callable[[], object]) -> None:
    """Return once `done()` is true: asked again and again at first, then between sleeps.

    A sleep lasts a tenth of the wait so far, so that a wait ends about a tenth late at most.
    """
    began = time.perf_counter()
    while not done():
        waited = time.perf_counter() - began
        if waited > SPIN_SECONDS:
            time.sleep(min(LONGEST_SLEEP, waited / 10))
        else:
            os.sched_yield()
