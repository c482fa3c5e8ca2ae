import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launchers import Launch, check_sizes, detect


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
        # A batch script is in a job, but not in a step: it starts ranks, it is none.
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


def test_worlds_of_one_are_refused_with_the_launchers_own_cure() -> None:
    with pytest.raises(UsageError, match=r"srun started 4 ranks, but MPI sees 1.*--mpi=pmix"):
        check_sizes(Launch("srun", 0, 4, ""), 1, "Open MPI v5.0.11, package")
    with pytest.raises(UsageError, match=r"mpirun started 4.*launcher of this MPI \(Open MPI v5"):
        check_sizes(Launch("mpirun", 0, 4, ""), 1, "Open MPI v5.0.11, package")


def test_sizes_that_agree_or_are_not_said_pass() -> None:
    check_sizes(Launch("mpirun", 0, 4, ""), 4, "")
    check_sizes(Launch("mpirun", 0, None, ""), 3, "")
