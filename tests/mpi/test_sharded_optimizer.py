"""A run that divides its optimizer among replicas makes the updates of one that does not."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvdtrain.backends.pytorch.session import under_plan
from hvdtrain.backends.pytorch.state import (
    local_share,
    named_state,
    put_arrays,
    state_by_name,
    to_array,
)
from hvdtrain.config import TrainConfig
from hvdtrain.parallel.runtime import Runtime, UpdateRule
from hvdtrain.plan.cut import Share, cut
from hvdtrain.plan.plan import Plan
from hvdtrain.sync.collectives import MPICollectives
from hvdtrain.sync.gradients import ShardedGradients, SlicedSums
from hvdtrain.sync.states import States
from hvdtrain.world import World, communicator_among
from tests.mpi.common import components_of, names, run_step, runtime_of, whole_state
from tests.mpi.plans import PLANS
from tests.mpi.test_sums import SIZE, parity_of, replicated_plans

ADAM = TrainConfig(
    model="own", data="", precision="fp64", optimizer="adam", lr=0.01, reduce_with="mpi"
)
SGD = replace(ADAM, optimizer="sgd", momentum=0.9, weight_decay=0.1)
ADAMW = replace(ADAM, optimizer="adamw", weight_decay=0.1)
BATCHES = (13, 26, 7)
State = dict[str, np.ndarray]

pytestmark = pytest.mark.several_ranks


def plan_of(world: World, name: str) -> Plan:
    made = PLANS[world.size][name](names(components_of("resnet", SIZE)))
    return replace(made, microbatches=1)


def start(world: World, plan: Plan, config: TrainConfig) -> Runtime:
    return runtime_of(config, plan, components_of("resnet", SIZE), SIZE, world)


def steps(world: World, plan: Plan, runtime: Runtime, first: int = 0, count: int = 3) -> None:
    for number in range(first, first + count):
        batch_size = BATCHES[number % len(BATCHES)]
        run_step(runtime, plan, world, SIZE, batch_size, number)


def checkpoint(world: World, plan: Plan, runtime: Runtime) -> State:
    """Return the whole state as a checkpoint holds it, on all ranks."""
    share = local_share(plan, runtime.parts, world.rank)
    held = {name: to_array(tensor.detach()).copy() for name, tensor in share.items()}
    return {name: value for theirs in world.gather(held) for name, value in theirs.items()}


def largest_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    assert one.keys() == other.keys()
    assert all(one[name].shape == other[name].shape for name in one)
    return max(float(np.abs(one[name] - other[name]).max()) for name in one if one[name].size)


def trained(
    world: World, plan: Plan, config: TrainConfig, rule: UpdateRule | None = None
) -> tuple[State, State]:
    """Return the tensors, and the checkpoint, after a few steps."""
    runtime = start(world, plan, config)
    if rule is not None:
        runtime.settings = replace(runtime.settings, rule=rule)
    steps(world, plan, runtime)
    states = whole_state(plan, runtime, world), checkpoint(world, plan, runtime)
    runtime.observer.close()
    return states


@pytest.mark.parametrize("config", [SGD, ADAM, ADAMW], ids=lambda config: config.optimizer)
def test_updates_and_state_are_those_of_a_whole_optimizer(
    world: World, config: TrainConfig
) -> None:
    for name in replicated_plans(world.size):
        plan = plan_of(world, name)
        whole = trained(world, plan, config)
        sharded = trained(world, plan, replace(config, shard_optimizer=True))
        for ours, theirs in zip(sharded, whole, strict=True):
            assert largest_difference(ours, theirs) < 1e-12, name


def test_horovod_scatters_and_gathers_too(world: World, horovod: Any) -> None:
    config, plan = replace(ADAM, reduce_with="horovod"), plan_of(world, "dp")
    whole = trained(world, plan, config)
    sharded = trained(world, plan, replace(config, shard_optimizer=True))
    assert largest_difference(sharded[1], whole[1]) < 1e-12


@pytest.mark.parametrize("name", ["clip", "limit", "skip"])
def test_norms_are_those_of_whole_gradients(world: World, name: str) -> None:
    rule = {
        "clip": UpdateRule(clip_norm=0.05),
        "limit": UpdateRule(largest_norm=1e-3),
        "skip": UpdateRule(largest_norm=1e-3, skips=True),
    }[name]
    plan = plan_of(world, "dp")
    whole = trained(world, plan, ADAM, rule)
    sharded = trained(world, plan, replace(ADAM, shard_optimizer=True), rule)
    assert largest_difference(sharded[0], whole[0]) < 1e-12


def test_steps_and_gradients_are_the_serial_ones(world: World) -> None:
    # `check_plan` also compares the gradients that each replica's optimizer used, by parameter.
    config = replace(ADAM, shard_optimizer=True, batch_size=26)
    for plan in (replicated_plans(world.size)[0], replicated_plans(world.size)[-1]):
        parity = parity_of(world, plan, config)
        assert parity.is_within, (plan, parity)


def test_each_replica_holds_its_part_of_the_state(world: World) -> None:
    plan, sizes = plan_of(world, "dp"), []
    for config in (ADAM, replace(ADAM, shard_optimizer=True)):
        runtime = start(world, plan, config)
        steps(world, plan, runtime, count=1)
        sizes.append(max(world.gather(state_bytes(runtime))))
        runtime.observer.close()
    whole, sharded = sizes
    assert sharded < 1.05 * whole / world.size


def state_bytes(runtime: Runtime) -> int:
    optimizer = runtime.parts[0].optimizer
    assert optimizer is not None
    return sum(
        value.nbytes
        for entries in optimizer.state.values()
        for value in entries.values()
        if isinstance(value, Tensor)
    )


@pytest.mark.parametrize("saved_sharded", [True, False])
def test_a_checkpoint_continues_with_and_without_the_option_and_on_other_replicas(
    world: World, saved_sharded: bool
) -> None:
    before = plan_of(world, "dp")
    runtime = start(world, before, replace(ADAM, shard_optimizer=saved_sharded))
    steps(world, before, runtime)
    saved = checkpoint(world, before, runtime)
    steps(world, before, runtime, first=3, count=2)
    expected = checkpoint(world, before, runtime)
    runtime.observer.close()
    for name in PLANS[world.size]:
        after = plan_of(world, name)
        if after.splits_backward or cut(after, 13).microbatches != cut(before, 13).microbatches:
            continue
        resumed = start(world, after, replace(ADAM, shard_optimizer=not saved_sharded))
        put_arrays(resumed.parts, saved)
        assert largest_difference(checkpoint(world, after, resumed), saved) == 0.0, name
        if name == "dp":
            steps(world, after, resumed, first=3, count=2)
            assert largest_difference(checkpoint(world, after, resumed), expected) < 1e-12
        resumed.observer.close()


def test_a_change_of_the_plan_takes_the_state_along(world: World) -> None:
    config, components = replace(ADAM, shard_optimizer=True), components_of("resnet", SIZE)
    plans = [plan_of(world, name) for name in replicated_plans(world.size)]
    before = plans[0]
    runtime = start(world, before, config)
    for after in [*plans[1:], plans[0]]:
        steps(world, before, runtime, count=1)
        held = checkpoint(world, before, runtime)
        runtime = under_plan(runtime, config, before, after, components, SIZE, world)
        assert largest_difference(checkpoint(world, after, runtime), held) == 0.0
        before = after
    runtime.observer.close()


def not_gathered(self: ShardedGradients, kind: str, buffers: Mapping[str, Tensor]) -> None:
    if kind != "weights":
        EXCHANGE(self, kind, buffers)


def averaged(self: ShardedGradients, kind: str, buffers: Mapping[str, Tensor]) -> None:
    EXCHANGE(self, kind, buffers)
    if kind == "weights":
        for flat in buffers.values():
            flat /= self.collectives.size


EXCHANGE: Callable[..., None] = ShardedGradients._exchange


@pytest.mark.parametrize("fault", [not_gathered, averaged])
def test_a_wrong_gathering_of_weights(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    monkeypatch.setattr(ShardedGradients, "_exchange", fault)
    parity = parity_of(world, "dp", replace(ADAM, shard_optimizer=True, batch_size=26))
    assert not parity.is_within
    assert "the update of" in parity.fault or "the gradient of" in parity.fault


def test_an_average_instead_of_a_sum(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = SlicedSums.finish

    def average(self: SlicedSums, bucket: Any, handle: Any) -> None:
        finish(self, bucket, handle)
        bucket.flat /= self.collectives.size

    monkeypatch.setattr(SlicedSums, "finish", average)
    parity = parity_of(world, "dp", replace(ADAM, shard_optimizer=True, batch_size=26))
    assert not parity.is_within


def test_named_state_is_whole_on_every_replica(world: World) -> None:
    plan = plan_of(world, "dp")
    runtime = start(world, plan, replace(ADAM, shard_optimizer=True))
    steps(world, plan, runtime, count=1)
    part = runtime.parts[0]
    shapes = {name: value.shape for name, value in part.model.parameters().items()}
    last = list(shapes)[-1]
    assert named_state(part, {last} if world.rank else {}).keys() == (
        {last} if world.rank else set()
    )
    for name, group in named_state(part, shapes).items():
        for key, value in group.items():
            if key.endswith(("/exp_avg", "/exp_avg_sq")):
                assert value.shape == shapes[name]
                assert bool(value.any()) or not shapes[name].numel()
    runtime.observer.close()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_replica_without_elements_takes_part(world: World, kind: Any) -> None:
    ranks = tuple(range(world.size))
    communicator_among(ranks)
    weight = nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64))
    collectives = MPICollectives(ranks, world.rank, f"alone.{kind.__name__}")
    states = States(dict, lambda _: None)
    gradients = ShardedGradients({"weight": weight}, {}, states, collectives)
    assert gradients.pieces["weight"].numel() == (world.rank == 0)
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    trained = list(gradients.updated().values())
    optimizer = kind(trained, lr=0.1, fused=True, **settings)
    for _ in range(2):
        assert weight.grad is not None
        weight.grad.fill_(1.0)
        gradients.start(Share(1 / world.size, world.rank == 0))
        gradients.finish()
        assert gradients.are_finite()
        optimizer.step()
        gradients.after_update()
        gradients.zero()
    assert len(set(world.gather(weight.item()))) == 1
    assert weight.item() < 1.9
    state = state_by_name(optimizer, gradients.updated())
    whole = world.gather(
        {
            key: value.tolist()
            for key, value in gradients.whole_state(state, {"weight"})["weight"].items()
        }
    )
    assert all(entries == whole[0] and entries for entries in whole)
