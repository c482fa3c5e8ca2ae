"""Plans compute the gradients of the serial step on a device whose copies are late."""

from collections.abc import Iterator

import pytest

from hvdtrain.world import World
from tests.late import LateEvent, LateStream, late_device
from tests.mpi.plans import PLANS
from tests.mpi.test_plans import parity_of

pytestmark = pytest.mark.several_ranks


@pytest.fixture
def late() -> Iterator[LateStream]:
    with late_device() as stream:
        yield stream


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    from mpi4py import MPI

    if "plan" in metafunc.fixturenames:
        plans = list(PLANS[MPI.COMM_WORLD.size])
        metafunc.parametrize("plan", dict.fromkeys((plans[0], plans[-1], "mp")))


def test_gradients_are_the_serial_ones(world: World, plan: str, late: LateStream) -> None:
    parity = parity_of(world, plan, "cnn", reduce_with="mpi")
    assert parity.is_within, parity
    assert late.queue


def test_without_the_wait_they_are_not(
    world: World, late: LateStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateEvent, "synchronize", lambda event: None)
    assert not parity_of(world, "mp", "cnn", reduce_with="mpi").is_within
