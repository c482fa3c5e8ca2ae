"""Which launchers start ranks here, and the exact line for each, tried before it is printed."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdtrain.doctor.check import Check
from hvdtrain.doctor.libraries import Launcher, identity
from hvdtrain.doctor.process import Outcome, run, words

TRY_SECONDS = 60.0
# What a line is tried with: every rank starts MPI as `train` does and says who it is.
SAY_RANK = """
from hvdtrain import world
here = world.start()
print(f"rank {here.rank} of {here.size}.", flush=True)
world.stop()
"""


@dataclass(frozen=True)
class Site:
    """What the right launch lines depend on.

    `mpi` is name and version of the MPI; `cores` counts whole cores, which Open MPI gives out as
    slots; `folder` is the one that must be put first in PATH, None if it need not be; `tasks` are
    those of the Slurm job that doctor runs in, 0 outside one.
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
    """How one launcher starts ranks: `before` goes in front of the program."""

    launcher: str
    ranks: int
    before: str

    def command(self, program: str) -> str:
        """The line for a shell, the options of `train` to be put behind it."""
        return f"{self.before} {program} train"


def look_at_site(launcher: Launcher) -> Site:
    """Find what the launch lines depend on."""
    folder = Path(sys.executable).parent
    programs = ("mpirun", "horovodrun", "hvdtrain", "python")
    beside = [name for name in programs if (folder / name).exists()]
    hidden = any(shutil.which(name) != str(folder / name) for name in beside)
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"} <= os.environ.keys()
    cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
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
    """Tasks of the Slurm job that this process may start steps in; 0 outside one.

    A task of a step holds the resources that another step would wait for.
    """
    if "SLURM_JOB_ID" not in environment or "SLURM_STEP_ID" in environment:
        return 0
    number = environment.get("SLURM_NTASKS") or environment.get("SLURM_JOB_NUM_NODES", "0")
    return int(number)


def numbers_of_ranks(cores: int) -> tuple[int, ...]:
    """Two, and four where that is more than there are cores."""
    return (2,) if cores >= 4 else (2, 4)


def launch_lines(site: Site) -> list[LaunchLine]:
    """The lines that should work here."""
    path = f'env PATH="{site.folder}:$PATH" ' if site.folder else ""
    lines = []
    for ranks in numbers_of_ranks(site.cores):
        if site.has_mpirun and site.has_horovodrun:
            lines.append(LaunchLine("horovodrun", ranks, f"{path}{_horovodrun(site, ranks)}"))
        if site.has_mpirun:
            lines.append(LaunchLine("mpirun", ranks, f"{path}{_mpirun(site, ranks)}"))
    if site.tasks > 1:
        lines.append(LaunchLine("srun", site.tasks, f"{path}srun --mpi=pmix"))
    return lines


def own_line(site: Site, ranks: int) -> str:
    """The line for hvdtrain's own launcher, which needs nothing in PATH."""
    program = site.program
    if site.folder:
        folder = shlex.quote(site.folder)
        program = f"{folder}/{program}"
    return f"{program} train --ranks {ranks}"


def try_line(line: LaunchLine) -> Outcome:
    """Start the ranks of a line with a program that only says who it is."""
    program = f"{shlex.quote(sys.executable)} -c {shlex.quote(SAY_RANK)}"
    return run(["/bin/sh", "-c", f"{line.before} {program}"], TRY_SECONDS)


def line_check(line: LaunchLine, outcome: Outcome, site: Site) -> Check:
    """Judge a line that was tried."""
    name = f"{line.launcher}, {line.ranks} ranks"
    expected = {(rank, line.ranks) for rank in range(line.ranks)}
    said = re.findall(r"rank (\d+) of (\d+)\.", outcome.output)
    worlds = [(int(rank), int(size)) for rank, size in said]
    if outcome.code == 0 and set(worlds) == expected and len(worlds) == line.ranks:
        return Check(name, "ok", f"they started in one MPI world{_why(line, site)}")
    text = f"{line.before} does not work: {outcome.reason}"
    if outcome.code == 0:
        sizes = ", ".join(sorted({size for _, size in said})) or "none"
        text = f"{line.before} started {len(worlds)} ranks in worlds of {sizes}"
    cures = {
        "srun": "srun --mpi=list must name pmix; or use mpirun inside the allocation",
        "horovodrun": f"use mpirun, or {own_line(site, line.ranks)}",
        "mpirun": "put the mpirun of the MPI that mpi4py loads first in PATH (see: one MPI)",
    }
    if line.launcher == "horovodrun" and site.tasks:
        # It asks for localhost, which need not be a node of the job.
        return Check(name, "note", text, "in a job, use srun --mpi=pmix or mpirun")
    return Check(name, "fault", text, cures[line.launcher])


def find_slurm() -> Check:
    """Ask Slurm, where it is, which version it is and what it can start."""
    if shutil.which("srun") is None:
        return slurm_check("", None)
    return slurm_check(words(["srun", "--version"]), run(["srun", "--mpi=list"], 10))


def slurm_check(version: str, kinds: Outcome | None) -> Check:
    """Slurm, by what `srun --version` and `srun --mpi=list` write; None: there is no srun."""
    name = "Slurm"
    if kinds is None:
        text = "no srun here; on a cluster, run doctor on a node of it"
        return Check(name, "note", text)
    if kinds.code != 0:
        text = f"srun is here, but reaches no cluster: {kinds.reason}"
        return Check(name, "note", text, "on a cluster, run doctor on a node of it")
    found = set((kinds.output + kinds.errors).split())
    names = sorted(word for word in found if re.fullmatch(r"pmi\d|pmix(_v\d+)?|none", word))
    text = f"{version or 'of unknown version'}, srun --mpi kinds: {', '.join(names) or 'none'}"
    if any(name.startswith("pmix") for name in names):
        return Check(name, "ok", f"{text}; in a job: srun --mpi=pmix hvdtrain train ...")
    cure = "start ranks with mpirun inside the job, or ask the site for Slurm's pmix plugin"
    return Check(name, "note", f"{text}; no pmix, so srun cannot start ranks", cure)


def _horovodrun(site: Site, ranks: int) -> str:
    if site.mpi[0] != "Open MPI":
        return f"horovodrun -np {ranks}"
    return f'horovodrun -np {ranks} --binding-args="--bind-to none{_shared_cores(site, ranks)}"'


def _mpirun(site: Site, ranks: int) -> str:
    if site.mpi[0] != "Open MPI":
        return f"mpirun -n {ranks}"
    leave = " --allow-run-as-root" if site.root_needs_leave else ""
    return f"mpirun{leave} -np {ranks} --bind-to none{_shared_cores(site, ranks)}"


def _shared_cores(site: Site, ranks: int) -> str:
    """Open MPI's option for more ranks than cores, which some machines have no slots for."""
    return " --map-by :OVERSUBSCRIBE" if ranks > site.cores else ""


def _why(line: LaunchLine, site: Site) -> str:
    needed = site.mpi[0] == "Open MPI" and not site.mpi[1].startswith(("3.", "4."))
    if line.launcher != "horovodrun" or not needed:
        return ""
    return "; not without --binding-args, as Horovod's own are not those of Open MPI 5"
