"""Runs tests/mpi and tests/mpi_keras under mpirun, once for each number of ranks."""

import re
import subprocess
import sys

import pytest

from hvdtrain.launch import mpirun
from tests.conftest import ROOT, program_environment

PYTEST = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
IMPORTS = ("-o", "addopts=--import-mode=importlib")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_everything_in_tests_mpi_passes_on_all_ranks(ranks: int) -> None:
    everything_passes("tests/mpi", ranks)


@pytest.mark.parametrize("ranks", [1, 3])  # whose shares differ
def test_everything_in_tests_mpi_keras_passes_on_all_ranks(ranks: int) -> None:
    everything_passes("tests/mpi_keras", ranks)


def everything_passes(folder: str, ranks: int) -> None:
    """On all ranks, with nothing skipped."""
    done = subprocess.run(
        [*mpirun(ranks), sys.executable, "-m", "pytest", *PYTEST, *IMPORTS, folder],
        cwd=ROOT,
        env=program_environment() | {"COLUMNS": "100", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    closings = re.findall(r"(\d+) passed(.*) in ", done.stdout)
    assert len(closings) == ranks, done.stdout[-6000:]
    assert len({count for count, _ in closings}) == 1
    assert not any("skipped" in rest or "failed" in rest for _, rest in closings)
