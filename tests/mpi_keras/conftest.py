"""Tests in this folder run under mpirun as those of tests/mpi do, without PyTorch beside them."""

import sys
from collections.abc import Iterator

import pytest

from hvdtrain import tf as distributed
from hvdtrain import world
from tests.mpi.conftest import (
    pytest_collection_modifyitems as pytest_collection_modifyitems,
)
from tests.mpi.conftest import (
    pytest_runtest_makereport as pytest_runtest_makereport,
)


@pytest.fixture(scope="session")
def here() -> Iterator[world.World]:
    yield distributed.start(threads=1)
    assert "torch" not in sys.modules
    world.stop()
