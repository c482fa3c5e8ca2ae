"""Fixtures for tests under mpirun: each test runs on all ranks, with any world size.

A test that fails on one rank would leave the others waiting in a collective call. Therefore the
job ends as soon as that rank has printed its failure.
"""

import os
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from hvdtrain.host import launchers
from hvdtrain.world import World, import_mpi, start, start_horovod, stop

ANOTHER_MPI = "HVDTRAIN_TEST_ANOTHER_MPI"  # is set where Horovod is not built for the MPI


def pytest_configure() -> None:
    """Start MPI as a run does, before an import in a test starts it without our settings."""
    launch = launchers.detect(os.environ)
    if launch.size != 1:
        import_mpi(launch, "auto")


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # many plans in one process
    yield start(threads=1)
    stop()


@pytest.fixture(scope="session")
def horovod(world: World) -> Any:
    return start_horovod(2**20) if world.size > 1 else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need several ranks if there is only one, or Horovod with another MPI."""
    left = []
    if launchers.detect(os.environ).size == 1:
        left = [item for item in items if item.get_closest_marker("several_ranks")]
    if ANOTHER_MPI in os.environ:
        left += [item for item in items if "horovod" in getattr(item, "fixturenames", ())]
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        launch = launchers.detect(os.environ)
        text = f"\nrank {launch.rank}: {item.nodeid}\n{report.longreprtext}"
        print(text, file=sys.__stderr__, flush=True)
        if launch.size != 1:
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(1)
    return report
