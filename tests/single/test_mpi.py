"""Runs of tests/mpi and tests/mpi_keras under mpirun, one per number of ranks."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from hvdtrain.launch import mpirun
from tests import warm
from tests.conftest import ROOT, program_environment

PYTEST = (
    *("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--durations=15"),
    *("-o", "addopts=--import-mode=importlib"),
)
QUICK = "not proof and not weekly"


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.proof)])
def test_what_is_quick_in_tests_mpi_passes_on_all_ranks(ranks: int) -> None:
    everything_passes("tests/mpi", ranks, QUICK)


@pytest.mark.proof
def test_everything_in_tests_mpi_passes_on_three_ranks() -> None:
    everything_passes("tests/mpi", 3, "not weekly")


# The packages of other MPIs, whose libraries mpi4py's wheel can load, too.
OTHERS = {"mpich": "MPICH Version", "impi-rt": "Intel(R) MPI Library"}
PORTABLE = "plans sums exchange pairs transfer world local_steps controls"


@pytest.mark.proof
@pytest.mark.proves("MPICH and Intel MPI sum gradients and carry activations as Open MPI does.")
@pytest.mark.parametrize(("package", "name"), OTHERS.items())
def test_what_needs_no_horovod_passes_with_another_mpi(
    tmp_path: Path, package: str, name: str
) -> None:
    """The package is found as a site's module is; Horovod, built for Open MPI, is hidden."""
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed")
    subprocess.run([*pip, "--prefix", str(tmp_path), package], check=True, timeout=600)
    hidden = tmp_path / "hidden"
    (hidden / "horovod").mkdir(parents=True)
    (hidden / "horovod" / "__init__.py").touch()
    settings = {
        "LD_LIBRARY_PATH": str(tmp_path / "lib"),
        "MPI4PY_MPIABI": "mpich",
        "PYTHONPATH": str(hidden),
        "HVDTRAIN_TEST_ANOTHER_MPI": "1",
    }
    paths = " ".join(f"tests/mpi/test_{name}.py" for name in PORTABLE.split())
    launcher = (str(tmp_path / "bin" / "mpiexec"), "-n", "2", sys.executable)
    told = "from mpi4py import MPI; print(MPI.Get_library_version())"
    environment = program_environment() | settings
    assert name in subprocess.check_output([*launcher, "-c", told], env=environment, text=True)
    everything_passes(paths, 2, QUICK, launcher, settings)


@pytest.mark.weekly
@pytest.mark.parametrize("folder", ["tests/mpi", "tests/mpi_keras"])
def test_what_takes_longest_passes_on_three_ranks(folder: str) -> None:
    everything_passes(folder, 3, "weekly")


@pytest.mark.proof
def test_long_runs_and_whole_models_pass_under_the_plans_of_four_ranks() -> None:
    """Three ranks have no replicas of a pipeline."""
    everything_passes("tests/mpi/test_long_runs.py tests/mpi/test_plans.py", 4, "proof")


def test_what_is_quick_in_tests_mpi_keras_passes_on_two_ranks() -> None:
    everything_passes("tests/mpi_keras", 2, QUICK)


@pytest.mark.proof
def test_everything_in_tests_mpi_keras_passes() -> None:
    """The shares of three ranks differ."""
    everything_passes("tests/mpi_keras", 3, "not weekly")


def everything_passes(
    paths: str,
    ranks: int,
    chosen: str,
    launcher: Sequence[str] = (),
    others: Mapping[str, str] = {},
) -> None:
    """Run the tests in these paths that a mark selects on all ranks; none may be skipped.

    Args:
        launcher: starts Python on the ranks; by default that of this environment.
        others: more variables of the environment.
    """
    framework = "tensorflow" if paths.endswith("keras") else "torch"
    settings = {"COLUMNS": "100", "NO_COLOR": "1", "HVDTRAIN_TEST_FRAMEWORK": framework, **others}
    tests = ("-m", "pytest", *PYTEST, "-m", chosen, *paths.split())
    done = subprocess.run(
        [*(launcher or (*mpirun(ranks), warm.python(framework))), *tests],
        cwd=ROOT,
        env=program_environment() | settings,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    print(done.stdout)  # --durations, with pytest -s
    closings = re.findall(r"(\d+) passed(.*) in ", done.stdout)
    assert len(closings) == ranks, done.stdout[-6000:]
    assert len({count for count, _ in closings}) == 1
    assert not any("skipped" in rest or "failed" in rest for _, rest in closings)
