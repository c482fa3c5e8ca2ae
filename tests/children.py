"""Work in processes of its own, which a test may kill."""

import os
from collections.abc import Callable


def in_child(work: Callable[[], object]) -> int:
    """Begin it in a forked process, which ends with 0, or with 1 if it raised; its number."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def end_of(child: int) -> int:
    """Wait for a child; what it ended with."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
