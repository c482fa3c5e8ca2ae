"""What the C library does with memory that a step has freed, and the next step asks for again."""

import ctypes
import os

# glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER, LARGEST = -1, 2**30  # bytes


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, instead of giving it back to the system at once.

    A training step frees its activations and asks for as much again. Given back, that memory
    comes as new pages, one fault each 4 KiB: on CPUs a third of the step of a small network. The
    process then holds what it held at its peak, as it does in every step.

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
    return bool(mallopt(M_TRIM_THRESHOLD, NEVER) and mallopt(M_MMAP_THRESHOLD, LARGEST))
