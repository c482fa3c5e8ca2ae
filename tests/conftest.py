"""What several folders of tests need: small data sets, and the program as a user starts it."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hvdtrain import data, launch

ROOT = Path(__file__).parent.parent
Program = Callable[..., subprocess.CompletedProcess[str]]

# Of tests that start mpirun themselves, beside those that kill it.
_sessions = tempfile.mkdtemp(prefix="mpirun-")
atexit.register(shutil.rmtree, _sessions, ignore_errors=True)
os.environ[launch.SESSIONS[0]] = _sessions

# Files that take minutes, the longest first: what begins last would be waited for alone.
LONGEST = (
    *("single/training/test_saving.py", "slurm/test_scripts.py", "single/training/test_faults.py"),
    *("single/test_mpi.py", "slurm/test_jobs.py", "slurm/test_site_mpi.py"),
    *("single/tf/test_train.py", "single/training/test_planning.py"),
    *("single/test_readme.py", "single/test_launch_ranks.py", "single/training/test_train.py"),
    *("single/training/test_plans.py", "slurm/test_study.py", "single/training/test_bad_steps.py"),
    *("single/training/test_copies.py", "single/test_doctor.py"),
    *("single/training/test_options.py", "single/training/test_restarts.py"),
    *("single/bench/test_bench.py", "single/models/test_models.py", "single/test_demo.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session")
def small_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """601 training images (an uneven tail) and their test images, of 5 classes."""
    folder = tmp_path_factory.mktemp("data") / "small"
    data.synth(folder, 601, 5, size=16, seed=1)
    return folder


@pytest.fixture(scope="session")
def hvdtrain() -> Program:
    """Run the program in a process of its own and return what it printed and its exit code."""
    return run_program


def run_program(
    *arguments: object,
    launcher: Sequence[str] = (),
    timeout: float = 300,  # jobs beside each other starve each other at times
    cwd: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    command = [*launcher, sys.executable, "-m", "hvdtrain", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        cwd=cwd,
        env=program_environment() | environment,
    )


def program_environment() -> dict[str, str]:
    """One thread a process, the environment's programs in PATH, and leave to be root."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"PATH": path, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **settings, **root}
