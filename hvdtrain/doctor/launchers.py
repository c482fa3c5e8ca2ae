"""The launch lines for each launcher on this machine, which are tried before they are printed."""

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
