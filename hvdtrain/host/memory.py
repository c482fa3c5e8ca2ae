"""Memory: the C library's allocator, Python's collector, out-of-memory kills by the kernel."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
