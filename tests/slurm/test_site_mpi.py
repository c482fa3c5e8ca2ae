"""Building for a site's MPI and training with it; Debian's Open MPI plays the site's."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Program, program_environment
from tests.single.training.jobs import summary_of
from tests.slurm.cluster import Cluster

# Without the tests' environment, because its mpicc is that of the PyPI package.
PATH = os.pathsep.join(
    folder
    for folder in os.environ["PATH"].split(os.pathsep)
    if Path(folder) != Path(sys.executable).parent
)
pytestmark = pytest.mark.weekly
TRAIN = ("train", "--model", "cnn", "--epochs", 1, "--batch-size", 50)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs that `make setup MPI=system` installs in a clone."""
    if shutil.which("mpicc", path=PATH) is None:
        reason = "there is no MPI of this machine: apt install libopenmpi-dev openmpi-bin"
        (pytest.fail if os.environ.get("HVDTRAIN_SLURM") == "required" else pytest.skip)(reason)
    folder = tmp_path_factory.mktemp("site") / "hvdtrain"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    # Where it is permitted, the compilers go before the polling ranks of tests beside them:
    # behind those, what takes 2 minutes alone took half an hour.
    done = subprocess.run(
        ["nice", "-n", "-10", "make", "setup", "MPI=system"],
        cwd=folder,
        env=environment | {"PATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout, done.stdout
    return folder / ".venv" / "bin"


def environment(programs: Path) -> dict[str, str]:
    return program_environment() | {"PATH": f"{programs}{os.pathsep}{PATH}"}


@pytest.mark.proves(
    "`make setup MPI=system` builds for the site's MPI, and training gives the same bits "
    "as with ours."
)
def test_ranks_of_this_machine_train_as_with_our_own_mpi(
    hvdtrain: Program, programs: Path, small_set: Path, tmp_path: Path
) -> None:
    """The weights are bit-identical: the sum of two gradients does not depend on the MPI."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    options = (*TRAIN, "--data", small_set, "--ranks", 2)
    done = hvdtrain(*options, "--run", ours)
    assert done.returncode == 0, done.stderr
    subprocess.run(
        [programs / "hvdtrain", *map(str, options), "--run", theirs],
        env=environment(programs),
        check=True,
        timeout=300,
    )
    digests = {run: summary_of(run)["weights_sha256"] for run in (ours, theirs)}
    assert digests[ours] == digests[theirs]
    doctor = subprocess.run(
        [programs / "hvdtrain", "doctor", "--json"],
        env=environment(programs),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    checks = {check["name"]: check["text"] for check in json.loads(doctor.stdout)["checks"]}
    # The mpirun of the machine, not that of the PyPI package.
    assert shutil.which("mpirun", path=PATH) in checks["one MPI"].split()


def test_nodes_of_a_cluster_train(
    cluster: Cluster, programs: Path, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    number = cluster.submit(
        *(f"--output={tmp_path}/%j.log", "--ntasks-per-node=1", "--cpus-per-task=1"),
        *("slurm/nodes.sbatch", *TRAIN[1:], "--data", small_set, "--plan", "mp"),
        RUN=str(run),
        PATH=environment(programs)["PATH"],
    )
    cluster.wait(number, "COMPLETED", "FAILED")
    log = (tmp_path / f"{number}.log").read_text()
    assert summary_of(run)["ranks"] == 2, log
