"""The measurement of all-reduces for the study of algorithms, on real ranks."""

from collections.abc import Callable

import pytest
import torch

from hvdtrain.errors import CheckFailed
from hvdtrain.planner.probe import started_mpi_sum
from hvdtrain.study.collectives import ranks
from hvdtrain.sync.mpi import MPICollectives
from hvdtrain.world import World, communicator_among

SIZES = (1024, 4096)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SECONDS", 0.0)
    monkeypatch.setattr(ranks, "LEAST", 1)


@pytest.mark.several_ranks
def test_all_ranks_agree_on_the_seconds_of_each_size(world: World) -> None:
    everybody = tuple(range(world.size))
    communicator_among(everybody)
    start = started_mpi_sum(MPICollectives(everybody, world.rank, "measured"))
    seconds = ranks.sum_seconds(world, start, SIZES, seed=3)
    assert list(seconds) == list(SIZES)
    assert all(0 < value < 10 for value in seconds.values())
    assert all(other == seconds for other in world.gather(seconds))


@pytest.mark.several_ranks
def test_an_all_reduce_that_sums_nothing_is_refused(world: World) -> None:
    def start(values: torch.Tensor, name: str) -> Callable[[], bool]:
        return lambda: True

    with pytest.raises(CheckFailed, match="has a wrong sum on rank"):
        ranks.sum_seconds(world, start, SIZES, seed=3)
