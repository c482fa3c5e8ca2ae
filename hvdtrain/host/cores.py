"""The cores and threads of a process: its share, or cores of its own that it is bound to."""

import os
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.errors import UsageError

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def own_threads(sharing: int) -> int:
    """Return the threads of this process: as the user has set them, else its share of the cores.

    Args:
        sharing: number of processes that may use the same cores.

    Raises:
        UsageError: if OMP_NUM_THREADS is set to anything but a number above 0.
    """
    if set_by_user := os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip():
        if not set_by_user.isdecimal() or int(set_by_user) == 0:
            raise UsageError(f"OMP_NUM_THREADS is {set_by_user}: unset it, or give a number")
        return int(set_by_user)
    return max(1, len(os.sched_getaffinity(0)) // sharing)


def bind(place: int, sharing: int, threads: int) -> None:
    """Bind this process to cores of its own, one per thread.

    Args:
        place: of this process among those that may use the same cores, from 0.
        sharing: number of these processes.
        threads: threads of each of them.

    Raises:
        UsageError: if there are fewer cores than threads.
    """
    cores = physical_first(sorted(os.sched_getaffinity(0)))
    if sharing * threads > len(cores):
        raise UsageError(
            f"--bind needs a core per thread, and {sharing} rank(s) x {threads} thread(s) share "
            f"{len(cores)} core(s): use fewer ranks or --threads, or leave --bind out"
        )
    use(set(cores[place * threads : (place + 1) * threads]))


def use(cores: set[int]) -> None:
    """Let all threads of this process run on these cores only."""
    # Threads that run already, such as those of MPI, keep their own cores otherwise.
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:  # it has ended
            continue


def physical_first(cores: Sequence[int]) -> list[int]:
    """Return logical cores in an order that uses each physical core once before any twice."""
    first: list[int] = []
    second: list[int] = []
    seen: set[int] = set()
    for core in cores:
        (second if core in seen else first).append(core)
        seen |= siblings(core)
    return first + second


def siblings(core: int) -> set[int]:
    """Return the logical cores of the physical core of `core`; `core` alone if it is unknown."""
    try:
        text = Path(SIBLINGS.format(core)).read_text()
    except OSError:
        return {core}
    together = {core}
    for part in text.split(","):
        start, _, end = part.strip().partition("-")
        together |= set(range(int(start), int(end or start) + 1))
    return together
