"""Parameter servers that sum gradients: against the exact run."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.errors import UsageError
from hvdtrain.models.component import Component
from hvdtrain.plan.plan import Plan, Stage
from hvdtrain.sync.server import Worker
from hvdtrain.sync.states import Slice
from hvdtrain.world import World
from tests.mpi.apart import (
    BOUND,
    SEEN,
    SIZE,
    config_of,
    difference,
)
from tests.mpi.common import CLASSES, components_of
from tests.mpi.served import OPTIMIZERS, Served, trained, workers

pytestmark = pytest.mark.several_ranks


def servers_of(world: World) -> range:
    return range(1, min(world.size, 3))


@pytest.mark.proves(
    "With servers a run is the exact one if they sum each step; otherwise weights never "
    "miss more steps than the bound, and updates are those of a serial replay."
)
@pytest.mark.parametrize("options", OPTIMIZERS)
@pytest.mark.parametrize("last", [1, 0])
def test_servers_that_sum_gradients_make_the_exact_run(
    world: World, options: dict[str, Any], last: int
) -> None:
    for servers in servers_of(world):
        expected = trained(world, "exact", servers, last=last, **options)
        actual = trained(world, "server", servers, last=last, **options)
        assert difference(actual, expected) <= BOUND


def test_batch_norm_statistics_are_those_of_the_exact_run(world: World) -> None:
    options: dict[str, Any] = {"steps": 2, "model": "resnet", "sizes": (40, 39)}
    expected = trained(world, "exact", 1, **options)
    actual = trained(world, "server", 1, **options)
    assert any("num_batches_tracked" in name for name in actual)
    assert difference(actual, expected) <= 1e-10  # batch norm multiplies rounding errors


def test_a_worker_whose_gradients_are_left_out_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(world, "exact", 1)
    add = Slice.add_gradients
    added: list[None] = []

    def forgetful(self: Slice, flat: torch.Tensor) -> None:
        added.append(None)
        if len(added) != 3:
            add(self, flat)

    monkeypatch.setattr(Slice, "add_gradients", forgetful)
    assert difference(trained(world, "server", 1), expected) > SEEN


def test_a_wrong_rate_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(world, "exact", 1)
    push = Worker.push
    monkeypatch.setattr(Worker, "push", lambda self, rate: push(self, rate * 1.001))
    assert difference(trained(world, "server", 1), expected) > SEEN


def test_a_step_with_bad_gradients_leaves_the_weights(world: World) -> None:
    config = config_of("server")
    plan, components = workers(world, 1), components_of("cnn", SIZE)
    trainer = Served(config, plan, components, world)
    trainer.step(0)
    before = trainer.whole()
    for part in trainer.runtime.parts.values():
        if world.rank == 0:
            part.gradients.are_finite = lambda: False  # type: ignore[method-assign]
    trainer.step(1)
    assert difference(trainer.whole(), before) == 0
    trainer.meet()


def expected_bytes(parameters: Mapping[str, nn.Parameter]) -> int:
    return sum(value.nbytes for value in parameters.values())


def test_gradients_and_weights_are_sent_once_per_worker_and_step(world: World) -> None:
    servers = min(2, world.size - 1)
    config = config_of(f"server,servers={servers}")
    components = components_of("cnn", SIZE)
    trainer = Served(config, workers(world, servers), components, world, (13,))
    trainer.train(0, 3)
    held = expected_bytes(trainer.runtime.parts[0].model.parameters())
    count = world.size - servers
    is_server = world.rank >= count
    assert trainer.counted("sent_bytes") == 3 * held * (count if is_server else 1)
    shares = world.gather(held)
    assert sum(shares[count:]) == shares[0], "each parameter has one server"


@pytest.mark.parametrize("options", OPTIMIZERS)
@pytest.mark.parametrize("stop", [3, 5])
def test_a_run_resumes_with_and_without_servers(
    world: World, options: dict[str, Any], stop: int
) -> None:
    components, servers = components_of("cnn", SIZE), min(2, world.size - 1)
    whole = Served(
        config_of(f"server,servers={servers}", **options),
        workers(world, servers),
        components,
        world,
    )
    whole.train(0, stop)
    arrays = whole.share()
    again = Served(whole.config, whole.plan, components, world)
    again.restore(arrays)
    alone = Served(config_of(reduce_with="mpi", **options), whole.plan, components, world)
    alone.restore(arrays)
    fewer = Served(config_of("server", **options), workers(world, 1), components, world)
    fewer.restore(alone.share())
    expected = whole.train(stop, 7)
    for ours, theirs in zip(again.train(stop, 7), expected, strict=True):
        assert difference(ours, theirs) == 0
    alone.train(stop, 7)
    assert difference(alone.whole(), whole.whole()) <= BOUND
    fewer.train(stop, 7)
    assert difference(fewer.whole(), whole.whole()) <= BOUND


class Frozen(nn.Module):
    """A layer with a frozen, a shared, an unused parameter and a changing buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.linear = nn.Linear(3 * SIZE * SIZE, CLASSES)
        self.same = self.linear
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(CLASSES, CLASSES)
        self.frozen.requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = self.seen * 3 + images[0].flatten()[:3].mul(100).long()
        logits: torch.Tensor = self.frozen(self.same(images.flatten(1)))
        return logits


def test_frozen_and_unused_parameters_and_other_buffers_are_those_of_the_exact_run(
    world: World,
) -> None:
    components = [Component("layer", Frozen)]
    count = world.size - 1
    plan = Plan((Stage(("layer",), tuple(range(count)), (1,) * count),))
    results = []
    for config in (config_of(reduce_with="mpi"), config_of("server")):
        trainer = Served(config, plan, components, world)
        trainer.train(0, 3)
        results.append(trainer.whole())
        whole = trainer.share()
        assert "optimizer/layer.unused.weight/momentum_buffer" in whole
        assert "model/layer.frozen.weight" in whole
    assert difference(*results) <= BOUND


def test_more_servers_than_parameters_are_refused(world: World) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, CLASSES, bias=False))

    plan = Plan((Stage(("layer",), (0,), (1,)),))
    config = config_of(f"server,servers={world.size - 1}")
    if world.size == 2:
        Served(config, plan, [Component("layer", build)], world).train(0, 2)
        return
    with pytest.raises(UsageError, match="use at most servers=1"):
        Served(config, plan, [Component("layer", build)], world)
