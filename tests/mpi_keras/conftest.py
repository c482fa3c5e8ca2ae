"""Fixtures for tests under mpirun, as in tests/mpi, but in processes without PyTorch."""

import sys
from collections.abc import Iterator

import pytest

from hvdtrain import keras as distributed
from hvdtrain.world import World, stop
from tests.mpi.conftest import (
    pytest_collection_modifyitems as pytest_collection_modifyitems,
)
from tests.mpi.conftest import (
    pytest_runtest_makereport as pytest_runtest_makereport,
)


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    yield distributed.start(threads=1)
    assert "torch" not in sys.modules
    stop()
