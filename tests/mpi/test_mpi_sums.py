"""Training whose gradients MPI sums, without Horovod, equals the serial run under every plan."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hvdtrain.check.parity import Parity
from hvdtrain.check.plan import check_plan
from hvdtrain.config import TrainConfig
from hvdtrain.sync import collectives
from hvdtrain.sync.collectives import MPICollectives
from hvdtrain.world import World, communicator_among
from tests.mpi.common import CLASSES, components_of, names
from tests.mpi.plans import PLANS

SIZE = 8
SEEN = 1e-3  # larger than any rounding error in fp64
CONFIG = TrainConfig(
    model="own", data="", precision="fp64", batch_size=26, reduce_with="mpi", seed=3
)


def replicated_plans(ranks: int) -> list[str]:
    """Return the names of the plans that have a replicated stage."""
    components = names(components_of("resnet", SIZE))
    made = {name: make(components) for name, make in PLANS[ranks].items()}
    return [
        name for name, plan in made.items() if any(len(stage.ranks) > 1 for stage in plan.stages)
    ]


def parity_of(world: World, plan: str, config: TrainConfig = CONFIG) -> Parity:
    """Compare a batch of 26, and one of 13, of a small network with batch norm."""
    components = components_of("resnet", SIZE)
    made = replace(PLANS[world.size][plan](names(components)), microbatches=2)
    return check_plan(config, components, made, SIZE, CLASSES, world, (26, 13))


@pytest.mark.several_ranks
def test_every_plan_computes_the_serial_steps(world: World) -> None:
    for plan in replicated_plans(world.size):
        parity = parity_of(world, plan)
        assert parity.is_within, (plan, parity)


@pytest.fixture
def everybody(world: World) -> MPICollectives:
    ranks = tuple(range(world.size))
    communicator_among(ranks)
    return MPICollectives(ranks, world.rank, "test")


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.int64, torch.uint8, torch.float16, torch.bfloat16],
    ids=str,
)
def test_sums_and_slices_of_every_dtype(
    world: World, everybody: MPICollectives, dtype: torch.dtype
) -> None:
    n = world.size
    values = torch.arange(3 * n, dtype=torch.float64)
    total = (values * (n * (n + 1) // 2)).to(dtype)
    local_values = (values * (world.rank + 1)).to(dtype)
    part = everybody.wait(everybody.reduce_scatter(local_values, "scatter"))
    assert torch.equal(part, total[3 * world.rank :][:3])
    rows = everybody.wait(everybody.all_gather(part, "gather"))
    assert torch.equal(rows.view(-1), total)
    everybody.wait(everybody.all_reduce(local_values, "sum"))
    assert torch.equal(local_values, total)


@pytest.mark.several_ranks
def test_replicas_may_start_prepared_operations_in_another_order(
    world: World, everybody: MPICollectives
) -> None:
    names = [f"bucket{number}" for number in range(4)]
    everybody.prepare(names)
    for _ in range(3):
        tensors = {name: torch.full((5,), float(i)) for i, name in enumerate(names)}
        order = names[:: 1 if world.rank else -1]
        handles = {name: everybody.all_reduce(tensors[name], name) for name in order}
        for i, name in enumerate(names):
            total = everybody.wait(handles[name])
            assert torch.equal(total, torch.full((5,), float(i * world.size)))


@pytest.mark.several_ranks
def test_another_order_of_operations_that_are_not_prepared_is_an_error(
    world: World, everybody: MPICollectives
) -> None:
    with pytest.raises(RuntimeError, match="prepare different operations"):
        everybody.prepare([f"of rank {min(world.rank, 1)}"])


@pytest.mark.several_ranks
@pytest.mark.parametrize("fault", ["average", "left out", "none"])
def test_a_wrong_sum(world: World, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    class Faulty(MPICollectives):
        def all_reduce(self, tensor: torch.Tensor, name: str) -> Any:
            if fault == "average":
                tensor /= self.size
            return super().all_reduce(tensor.clone() if fault == "left out" else tensor, name)

    monkeypatch.setattr(collectives, "MPICollectives", Faulty)
    parity = parity_of(world, "dp")
    is_wrong = parity.largest > SEEN or parity.largest != parity.largest
    assert is_wrong == (fault != "none"), parity


@pytest.mark.several_ranks
def test_horovod_is_not_needed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("Horovod was started")

    monkeypatch.setattr(collectives.worlds, "start_horovod", refuse)
    # Only one of the ranks lacks it.
    monkeypatch.setattr(collectives, "has_horovod", lambda: world.rank > 0)
    assert collectives.reduction_library(None, world) == "mpi"
    assert parity_of(world, "dp", replace(CONFIG, reduce_with=None)).is_within


def test_the_installed_library_is_recognised() -> None:
    assert collectives.has_horovod()
    assert collectives.DATATYPES.keys().isdisjoint(collectives.HALVES)
