"""Work in child processes, which a test may kill."""

import os
from collections.abc import Callable


def in_child(work: Callable[[], object]) -> int:
    """Start `work` in a forked process, which exits with 0, or 1 if it raised; return its pid."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def end_of(child: int) -> int:
    """Wait for a child, and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
