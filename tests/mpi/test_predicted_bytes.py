"""The planner's bytes per step are those that the ranks count, for each way to agree."""

from functools import cache
from typing import Any

import pytest
import torch

from hvdtrain.config import TrainConfig
from hvdtrain.models.component import Component
from hvdtrain.models.costs import ComponentCost, component_costs
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.plan.plan import Plan
from hvdtrain.planner import agreement
from hvdtrain.planner.agreement import agreement_of, rank_bytes
from hvdtrain.sync import compress, gradients
from hvdtrain.world import World
from tests.mpi.common import CLASSES, components_of, names, run_step, runtime_of
from tests.mpi.plans import PLANS

pytestmark = [pytest.mark.usefixtures("horovod"), pytest.mark.several_ranks]
SIZE = 8
WAYS: list[dict[str, Any]] = [
    {},
    {"compress": "fp16"},
    {"compress": "bf16"},
    {"compress": "int8"},
    {"compress": "topk:0.07"},
    {"compress": "powersgd:2"},
    {"compress": "powersgd:7"},
    {"sync": "local:2"},
    {"sync": "local:2,average-optimizer"},
    {"sync": "local:1,average-optimizer", "optimizer": "sgd"},
    {"sync": "elastic:2"},
    {"sync": "diloco:3"},
]
# Unequal shares, and a replica of two stages.
PLAN_OF = {2: "replicas that share unlike", 3: "overlapping", 4: "3+1, shares 3:2:1"}


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each stage have a small first bucket, and a second one with the statistics."""
    for module in (gradients, agreement):
        monkeypatch.setattr(module, "FIRST_BUCKET_BYTES", 2000)


def config_of(way: dict[str, Any]) -> TrainConfig:
    settings: dict[str, Any] = {"batch_size": 13, "lr": 0.01}
    if "compress" in way:
        way = way | {"compress": f"{way['compress']},after=0"}
    return TrainConfig(model="resnet", data="", **settings, **way).check()


def counted(runtime: Runtime) -> float:
    """Return the bytes that this rank has sent to agree."""
    return sum(
        counts.get("sent_bytes", 0.0)
        for part in runtime.parts.values()
        for counts in (part.gradients.counted(), part.meetings.counted())
    )


def sent(config: TrainConfig, plan: Plan, components: list[Component], world: World) -> float:
    """Return the bytes per step that this rank counts in a period, after the first one."""
    runtime, counts = runtime_of(config, plan, components, SIZE, world), [0.0]
    runtime.observer.close()
    period = agreement_of(config).period or 1
    for step in range(1, 2 * period + 1):
        for part in runtime.parts.values():
            part.meetings.before_step(0)
        run_step(runtime, plan, world, SIZE, 13, step)
        for part in runtime.parts.values():
            part.meetings.after_step(step)
        counts.append(counted(runtime))
    return (counts[-1] - counts[period]) / period


def predicted(config: TrainConfig, plan: Plan, rank: int) -> float:
    return rank_bytes(agreement_of(config), plan, costs_of())[rank]


@cache
def costs_of() -> dict[str, ComponentCost]:
    """Return the costs of all components by name."""
    components = components_of("resnet", SIZE)
    costs = component_costs(components, SIZE, classes=CLASSES, dtype=torch.float32)
    return {cost.name: cost for cost in costs}


@pytest.mark.proves("Predicted bytes are the counted ones, and a plan is chosen for what travels.")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(map(str, way.values())))
def test_predicted_bytes_are_the_counted_ones(world: World, way: dict[str, Any]) -> None:
    components, config = components_of("resnet", SIZE), config_of(way)
    plan = PLANS[world.size][PLAN_OF[world.size]](names(components))
    expected = predicted(config, plan, world.rank)
    assert sent(config, plan, components, world) == pytest.approx(expected, rel=1e-12)


def test_one_value_more_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    components, config = components_of("resnet", SIZE), config_of({"compress": "topk:0.07"})
    plan = PLANS[world.size]["dp"](names(components))
    largest = compress.largest_count
    monkeypatch.setattr(compress, "largest_count", lambda ratio, count: largest(ratio, count) + 1)
    expected = predicted(config, plan, world.rank)
    assert sent(config, plan, components, world) > 1.0001 * expected


def test_compression_sends_less_than_exact_sums(world: World) -> None:
    components = components_of("resnet", SIZE)
    plan = PLANS[world.size]["dp"](names(components))
    exact, *others = (
        predicted(config_of(way), plan, world.rank)
        for way in ({}, {"compress": "bf16"}, {"compress": "powersgd:2"}, {"sync": "local:4"})
    )
    assert all(other < 0.51 * exact for other in others)
