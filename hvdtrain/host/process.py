"""A process and its system: requests to stop, cores, memory and waiting; loads no torch."""

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

from hvdtrain.errors import UsageError

# Signals of schedulers, service managers and closing terminals. Several of them are one request:
# systemd sends SIGTERM and SIGHUP, Slurm sends SIGUSR1 before the time limit and SIGTERM at it.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# `timeout` and other wrappers deliver one Ctrl-C twice, within milliseconds.
SAME_CTRL_C_SECONDS = 0.5
PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Have Linux send this process a signal when the thread that started it ends."""
    with suppress(AttributeError):  # another system
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def suspend_with(pid: int) -> None:
    """Suspend this process, as Ctrl-Z does, and with it those that a launcher has started.

    The launcher itself runs on: it ends them if this process is killed meanwhile. One that it
    starts only now runs until it waits for the others.
    """
    import psutil

    others: list[psutil.Process] = []
    with suppress(psutil.Error):
        others = psutil.Process(pid).children(recursive=True)
    for process in others:
        with suppress(psutil.Error):
            process.suspend()
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTSTP)  # returns once this process continues
    signal.signal(signal.SIGTSTP, handler)
    for process in others:
        with suppress(psutil.Error):
            process.resume()


class StopRequest:
    """A context manager that records whether this process was requested to stop.

    The first signal decides between `interrupted` and `preempted` and takes effect at the next
    step; only a second Ctrl-C ends the process at once.
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
        """True if this process was requested to stop."""
        return self.interrupted or self.preempted

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *STOP_SIGNALS):
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup: the run continues after the terminal closes
                self._previous[number] = signal.signal(number, self._take)
            # Job scripts block the signals until there is a handler; pending ones arrive now.
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
        """Do nothing; subclasses override this, which is called once, at the first signal."""

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


def usable_cores() -> set[int]:
    """Return the logical cores that this process may use: all where none can be bound (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


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
    return max(1, len(usable_cores()) // sharing)


def bind(place: int, sharing: int, threads: int) -> None:
    """Bind this process to cores of its own, one per thread.

    Args:
        place: of this process among those that may use the same cores, from 0.
        sharing: number of these processes.
        threads: threads of each of them.

    Raises:
        UsageError: if there are fewer cores than threads, or the system binds no processes.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"--bind needs Linux, and this is {sys.platform}: leave it out")
    cores = physical_first(sorted(usable_cores()))
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


# glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER = -1
# The size up to which glibc adapts by itself. It could not reuse larger aligned blocks.
LARGEST = 2**25  # bytes


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory, instead of returning it to the system at once.

    A training step frees its activations and allocates as much again. Memory that was returned
    comes back as new pages, with one page fault per 4 KiB: on CPUs that is up to a third of the
    step of a small network. The process keeps its peak memory, which it needs in every step.

    Returns:
        Whether glibc keeps it now. False under another C library or allocator, or if the
        environment sets glibc's own options.
    """
    if "malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") and name.endswith("_") for name in os.environ
    ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # In this order: the first setting of either ends glibc's own adaptation of both.
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, NEVER))


def return_freed_memory() -> None:
    """Return freed memory to the system once, before allocations of other sizes."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause Python's search for garbage that refers to itself, inside of the context.

    It visits all objects again and again while millions without such references are made.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def processes_ended_for_memory() -> int:
    """Return the number of processes that the kernel of this host killed for lack of memory.

    It is 0 if the number is not known.
    """
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


Answer = TypeVar("Answer")

# MPI and Horovod wait by polling, and at best yield the core after each poll (sched_yield). If
# ranks share cores, polling takes them from the ranks that compute; two jobs on one machine were
# seen to delay each other by minutes.
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
