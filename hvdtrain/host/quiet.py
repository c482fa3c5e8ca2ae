"""A filter that keeps known, harmless remarks of libraries from standard error."""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Lines that TensorFlow writes to standard error whatever its log level is.
TENSORFLOW_REMARKS = ("oneDNN custom operations are on", "absl::InitializeLog()")
PROFILER_REMARKS = ("SyncActivityProfilerHandler.cpp",)  # and PyTorch's profiler


@contextmanager
def without(remarks: Sequence[str]) -> Iterator[None]:
    """Drop the lines that contain one of `remarks` and are written to descriptor 2 in the block.

    All other lines are written when the block ends, also after an exception.
    """
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            held.seek(0)
            for line in held:
                if not any(remark.encode() in line for remark in remarks):
                    os.write(2, line)
