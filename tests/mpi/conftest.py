"""Tests in this folder run under mpirun, each on all ranks at once, at any number of ranks.

A test that fails on one rank would leave the others waiting in a collective call: the job ends
at once, after that rank has printed its failure.
"""

import os
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from hvdtrain import launchers, world


def pytest_configure() -> None:
    """Start MPI as a run does, before a test's import starts it without our settings."""
    launch = launchers.detect(os.environ)
    if launch.size != 1:
        world.import_mpi(launch, "auto")


@pytest.fixture(scope="session")
def here() -> Iterator[world.World]:
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # many plans in one process
    yield world.start(threads=1)
    world.stop()


@pytest.fixture(scope="session")
def horovod(here: world.World) -> Any:
    return world.start_horovod(2**20) if here.size > 1 else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, and count as left out, what one rank alone cannot show."""
    if launchers.detect(os.environ).size != 1:
        return
    alone = [item for item in items if item.get_closest_marker("several_ranks")]
    items[:] = [item for item in items if item not in alone]
    config.hook.pytest_deselected(items=alone)


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
