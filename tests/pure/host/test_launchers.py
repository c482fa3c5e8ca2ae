import pytest

from hvdtrain.errors import UsageError
from hvdtrain.host.launchers import TORCHRUN, Launch, check_sizes, detect, needs_mpi


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launch("none", 0, 1, "")),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "job"},
            Launch("mpirun", 3, 4, "job"),
        ),
        (
            {
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_PROCID": "5",
                "PMIX_RANK": "5",
            },
            Launch("srun", 5, 8, "7.0"),
        ),
        # A batch script is in a job, but not in a step: it starts ranks, but is not a rank.
        (
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
            Launch("none", 0, 1, ""),
        ),
        ({"PMIX_RANK": "2", "PMIX_NAMESPACE": "x"}, Launch("mpirun", 2, None, "x")),
    ],
)
def test_the_launcher_is_found_from_its_variables(
    environment: dict[str, str], expected: Launch
) -> None:
    assert detect(environment) == expected


@pytest.mark.parametrize(
    "variable",
    [
        {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"},
        {"HOROVOD_CONTROLLER": "gloo"},
        {"HOROVOD_CPU_OPERATIONS": "GLOO"},
    ],
)
def test_gloo_is_refused_with_the_lines_that_work(variable: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"horovodrun --mpi, mpirun, srun --mpi=pmix"):
        detect(variable)


VARIABLES = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    "environment",
    [
        VARIABLES,
        VARIABLES | {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"},
        # torchrun in the shell of `srun --pty bash`.
        VARIABLES | STEP | {"SLURM_STEP_NUM_TASKS": "1", "TORCHELASTIC_RUN_ID": "none"},
    ],
)
def test_torchrun_is_found(environment: dict[str, str]) -> None:
    launch = detect(environment)
    assert (launch.launcher, launch.rank, launch.size) == (TORCHRUN, 1, 4)


def test_what_needs_mpi_is_refused_with_the_lines_that_work() -> None:
    error = str(needs_mpi("--plan mp", 4))
    assert error.startswith("--plan mp needs MPI, and torchrun or accelerate launch started 4")
    for line in (
        "hvdtrain train --ranks 4",
        "horovodrun -np 4",
        "mpirun -np 4",
        "srun --mpi=pmix",
    ):
        assert line in error


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        (VARIABLES | STEP, "srun"),
        (VARIABLES | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, "mpirun"),
        (VARIABLES | {"PMI_SIZE": "4"}, "mpiexec"),
        (VARIABLES | {"PMIX_RANK": "1"}, "mpirun"),
        (VARIABLES | {"WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, "none"),
        ({"MASTER_ADDR": "node1", "RANK": "0", "WORLD_SIZE": "4"}, "none"),
        (VARIABLES | {"WORLD_SIZE": "all"}, "none"),
    ],
)
def test_variables_of_torchrun_beside_a_launcher_or_for_one_process_are_no_torchrun(
    environment: dict[str, str], launcher: str
) -> None:
    assert detect(environment).launcher == launcher


def test_worlds_of_one_are_refused_with_the_launchers_own_cure() -> None:
    with pytest.raises(UsageError, match=r"srun started 4 ranks, but MPI sees 1.*--mpi=pmix"):
        check_sizes(Launch("srun", 0, 4, ""), 1, "Open MPI v5.0.11, package")
    with pytest.raises(UsageError, match=r"mpirun started 4.*launcher of this MPI \(Open MPI v5"):
        check_sizes(Launch("mpirun", 0, 4, ""), 1, "Open MPI v5.0.11, package")


def test_sizes_that_agree_or_are_not_said_pass() -> None:
    check_sizes(Launch("mpirun", 0, 4, ""), 4, "")
    check_sizes(Launch("mpirun", 0, None, ""), 3, "")
