"""A real Slurm for the tests of this folder."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slurm.cluster import LOCAL, Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Return the Slurm that the tests of a worker share."""
    with started() as slurm:
        yield slurm


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """Return a Slurm that a test may damage."""
    with started() as slurm:
        yield slurm


@contextmanager
def started() -> Iterator[Cluster]:
    """Start a Slurm, and stop it; skip if it is not installed, unless HVDTRAIN_SLURM=required."""
    if os.environ.get("HVDTRAIN_SLURM") != "required" and (
        os.geteuid() != 0 or shutil.which("slurmctld") is None
    ):
        pytest.skip("needs root, slurmctld, slurmd, slurm-client, munge and libpmix-dev")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    up = subprocess.run([LOCAL / "up", folder], capture_output=True, text=True, timeout=600)
    assert up.returncode == 0, up.stderr
    try:
        yield Cluster(folder)
    finally:
        subprocess.run([LOCAL / "down", folder], check=True, timeout=600)
