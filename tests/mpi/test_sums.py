"""Training without Horovod, by MPI's sums or torch.distributed's, equals the serial run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.check.parity import Parity
from hvdtrain.check.plan import check_plan
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.options.sections import Library
from hvdtrain.plan.cut import Share
from hvdtrain.sync import collectives
from hvdtrain.sync.collectives import Collectives, MPICollectives, TorchCollectives, open_group
from hvdtrain.sync.gradients import ReplicatedGradients
from hvdtrain.sync.states import States
from hvdtrain.world import World
from tests.mpi.common import CLASSES, components_of, names
from tests.mpi.plans import PLANS

SIZE = 8
SEEN = 1e-3  # larger than any rounding error in fp64
CONFIG = TrainConfig(model="own", data="", precision="fp64", batch_size=26, seed=3)
CPU = torch.device("cpu")
LIBRARIES: list[Library] = ["mpi", "torch"]


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    library: Library = request.param
    return library


def replicated_plans(ranks: int) -> list[str]:
    """Return the names of the plans that have a replicated stage."""
    components = names(components_of("resnet", SIZE))
    made = {name: make(components) for name, make in PLANS[ranks].items()}
    return [
        name for name, plan in made.items() if any(len(stage.ranks) > 1 for stage in plan.stages)
    ]


def parity_of(world: World, plan: str, config: TrainConfig) -> Parity:
    """Compare a batch of 26, and one of 13, of a small network with batch norm."""
    components = components_of("resnet", SIZE)
    made = replace(PLANS[world.size][plan](names(components)), microbatches=2)
    return check_plan(config, components, made, SIZE, CLASSES, world, (26, 13))


@pytest.mark.several_ranks
def test_every_plan_computes_the_serial_steps(world: World, library: Library) -> None:
    for plan in replicated_plans(world.size):
        parity = parity_of(world, plan, replace(CONFIG, reduce_with=library))
        assert parity.is_within, (plan, parity)


@pytest.fixture
def everybody(world: World, library: Library) -> Collectives:
    return open_group(library, tuple(range(world.size)), world, CPU, "test")("sums")


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.int64, torch.uint8, torch.float16, torch.bfloat16],
    ids=str,
)
def test_sums_and_slices_of_every_dtype(
    world: World, everybody: Collectives, dtype: torch.dtype
) -> None:
    n = world.size
    values = torch.arange(3 * n, dtype=torch.float64)
    total = (values * (n * (n + 1) // 2)).to(dtype)
    local_values = (values * (world.rank + 1)).to(dtype)
    part = everybody.wait(everybody.reduce_scatter(local_values, "scatter"))
    assert torch.equal(part, total[3 * world.rank :][:3])
    rows = everybody.wait(everybody.all_gather(part, "gather"))
    assert torch.equal(rows.view(-1), total)
    turned = everybody.wait(everybody.all_to_all(total, "turn"))
    assert torch.equal(turned.view(-1), part.repeat(n))
    everybody.wait(everybody.all_reduce(local_values, "sum"))
    assert torch.equal(local_values, total)


@pytest.mark.several_ranks
def test_all_replicas_start_their_buckets_in_one_order(
    world: World, everybody: Collectives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 reaches the layers in another order than the model's, and the last rank none."""
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    parameters = dict(layers.named_parameters())
    nothing = States(dict, lambda _: None)
    gradients = ReplicatedGradients(parameters, {}, nothing, everybody, bucket_bytes=1)
    started: list[str] = []
    start = everybody.all_reduce

    def noted(tensor: torch.Tensor, name: str) -> Any:
        started.append(name)
        return start(tensor, name)

    monkeypatch.setattr(everybody, "all_reduce", noted)
    order = (2, 0, 1) if world.rank == 0 else (0, 1, 2)
    expected = [bucket.name for bucket in gradients.buckets]
    assert len(expected) == 6
    for _ in range(3):
        share = Share(1 / world.size, world.rank == 0)
        gradients.announce(share)
        if world.rank < world.size - 1:
            value = torch.ones(2, 4)
            for number in order:
                value = layers[number](value)
            value.sum().backward()
        gradients.start(share)
        gradients.finish()
        gradients.zero()
    assert started == 3 * expected
    assert set(world.gather(tuple(started))) == {tuple(started)}


@pytest.mark.several_ranks
@pytest.mark.parametrize("fault", ["average", "left out", "none"])
def test_a_wrong_sum(
    world: World, library: Library, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    base: Any = {"mpi": MPICollectives, "torch": TorchCollectives}[library]

    class Faulty(base):
        def all_reduce(self, tensor: torch.Tensor, name: str) -> Any:
            if fault == "average":
                tensor /= self.size
            return super().all_reduce(tensor.clone() if fault == "left out" else tensor, name)

    monkeypatch.setattr(collectives, base.__name__, Faulty)
    parity = parity_of(world, "dp", replace(CONFIG, reduce_with=library))
    is_wrong = parity.largest > SEEN or parity.largest != parity.largest
    assert is_wrong == (fault != "none"), parity


@pytest.mark.several_ranks
def test_horovod_is_not_needed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("Horovod was started")

    monkeypatch.setattr(collectives.worlds, "start_horovod", refuse)
    # Only one of the ranks lacks it.
    monkeypatch.setattr(collectives, "has_horovod", lambda: world.rank > 0)
    assert collectives.reduction_library(None, world, CPU) == "mpi"
    assert parity_of(world, "dp", CONFIG).is_within
    with pytest.raises(UsageError, match="not installed on all ranks: run hvdtrain setup"):
        collectives.check_horovod(CPU, world)


@pytest.mark.several_ranks
def test_horovod_needs_several_threads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks sum by MPI if that of one of them lacks such support."""
    monkeypatch.setattr(collectives, "has_horovod", lambda: True)
    monkeypatch.setattr(World, "has_multiple_threads", property(lambda rank: rank.rank > 0))
    assert collectives.reduction_library(None, world, CPU) == "mpi"
    with pytest.raises(UsageError, match="does not support MPI_THREAD_MULTIPLE"):
        collectives.check_horovod(CPU, world)


@pytest.mark.usefixtures("horovod")
def test_the_installed_library_is_recognised() -> None:
    assert collectives.has_horovod()
    assert collectives.DATATYPES.keys().isdisjoint(collectives.HALVES)
