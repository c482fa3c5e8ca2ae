"""Memory: what the C library does with it, and whether the kernel ran out of it."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

# glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER = -1
# What glibc itself comes to keep, in time; of larger blocks aligned ones would not be found again.
LARGEST = 2**25  # bytes


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, instead of giving it back to the system at once.

    A training step frees its activations and asks for as much again. Given back, that memory
    comes as new pages, one fault each 4 KiB: on CPUs up to a third of the step of a small
    network. The process then holds what it held at its peak, as it does in every step.

    Returns:
        Whether it does now: not under another C library or allocator, nor where the environment
        sets glibc's own options.
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


def give_back_freed_memory() -> None:
    """Give what was freed back to the system, once: what comes is of other sizes."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def processes_ended_for_memory() -> int:
    """How many processes of this host the kernel has ended for lack of memory; 0 if not known."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
