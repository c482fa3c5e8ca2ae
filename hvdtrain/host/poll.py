"""Waiting for other ranks without taking their cores.

MPI and Horovod wait by polling, and at best yield the core after each poll (sched_yield). If ranks
share cores, polling takes them from the ranks that compute; two jobs on one machine were seen to
delay each other by minutes.
"""

import os
import time
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")

SPIN_SECONDS = 1e-3  # most waits are shorter, and these must not end late
LONGEST_SLEEP = 1e-3


def wait_until(
    done: Callable[[], Answer],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Answer:
    """Poll `done()`, first without pause, then with sleeps, and return its first true answer.

    A sleep lasts a tenth of the wait so far, so that a wait ends about a tenth late at most.
    """
    start = clock()
    while not (answer := done()):
        waited = clock() - start
        if waited > SPIN_SECONDS:
            sleep(min(LONGEST_SLEEP, waited / 10))
        else:
            os.sched_yield()
    return answer
