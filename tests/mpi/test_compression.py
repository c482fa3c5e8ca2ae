"""Compressed sums of gradients: nothing is lost, replicas stay equal, and state survives."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hvdtrain.config import TrainConfig
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.compress import PowerSums, Residual, TopKSums
from hvdtrain.sync.gradients import Sums
from hvdtrain.world import World
from tests.mpi.common import components_of, names, run_step, runtime_of, whole_state
from tests.mpi.compression import (
    METHODS,
    Replica,
    assert_equal_everywhere,
    distance,
    starting,
    total,
)
from tests.mpi.plans import PLANS

pytestmark = pytest.mark.usefixtures("horovod")
BOUND = 1e-12
SEEN = 1e-3  # larger than any rounding error
STEPS = 3
# Unequal shares, and a replica of two stages.
PLAN_OF = {2: "replicas that share unlike", 3: "overlapping", 4: "3+1, shares 3:2:1"}


def lost(world: World, replica: Replica, steps: int = STEPS) -> float:
    """Return the largest part of a gradient, in any step, that is neither sent nor kept."""
    worst = 0.0
    for number in range(steps):
        before = total(world, replica.residuals())
        replica.fill(number)
        gradients = total(world, {name: replica.results()[name] for name in before})
        replica.step(number)
        after, results = total(world, replica.residuals()), replica.results()
        assert_equal_everywhere(world, results)
        wanted = {name: gradients[name] + before[name] for name in before}
        worst = max(
            worst, distance({name: results[name] + after[name] for name in before}, wanted)
        )
    return worst


@pytest.mark.several_ranks
@pytest.mark.parametrize("method", METHODS)
def test_what_is_sent_and_what_is_kept_are_the_gradient(world: World, method: str) -> None:
    replica = Replica(world, method)
    assert lost(world, replica) < BOUND
    kept = np.concatenate([value.ravel() for value in replica.residuals().values()])
    norm = replica.gradients.counted()["residual_norm"]
    assert norm == pytest.approx(np.linalg.norm(kept))
    assert sum(world.gather(norm)) > 0, "the method has compressed"


class ForgetsResiduals(TopKSums):
    def after_update(self) -> None:
        super().after_update()
        for residual in self.residuals.values():
            residual.current.zero_()


class Averages(TopKSums):
    def receive(self, residual: Residual, handle: Any) -> None:
        super().receive(residual, handle)
        residual.gradients.div_(self.collectives.size + 1)


class SubtractsTheSum(PowerSums):
    """Each replica subtracts what all have sent, not what it has sent."""

    def receive(self, residual: Residual, handle: Any) -> None:
        full = residual.following.clone()
        super().receive(residual, handle)
        residual.following.copy_(full - residual.gradients)


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    "faulty",
    [
        lambda collectives: ForgetsResiduals(0.1, collectives),
        lambda collectives: Averages(0.1, collectives),
        lambda collectives: SubtractsTheSum(2, collectives),
    ],
    ids=["feedback left out", "mean for sum", "the residual of all"],
)
def test_a_loss_is_seen(world: World, faulty: Callable[[Collectives], Sums]) -> None:
    assert lost(world, Replica(world, "none", sums=faulty)) > SEEN


class AnyMatrix(PowerSums):
    def shrinks(self, rows: int, columns: int) -> bool:
        return True


EVERYTHING: dict[str, Callable[[Collectives], Sums]] = {
    "k = n": lambda collectives: TopKSums(1.0, collectives),
    "full rank": lambda collectives: AnyMatrix(100, collectives),
    "no smaller": lambda collectives: PowerSums(100, collectives),
    "not yet": lambda collectives: TopKSums(0.01, collectives, after=STEPS),
}


@pytest.mark.parametrize("sums", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_sums_that_leave_nothing_out_are_exact(
    world: World, sums: Callable[[Collectives], Sums]
) -> None:
    exact, replica = Replica(world, "none"), Replica(world, "none", sums=sums)
    for number in range(STEPS):
        exact.step(number)
        replica.step(number)
        assert distance(replica.results(), exact.results()) < BOUND
        assert statistics_differ_by(replica, exact) < BOUND


def statistics_differ_by(one: Replica, other: Replica) -> float:
    """Return the largest relative difference of any running statistic."""
    results, expected = one.results(), other.results()
    return max(
        distance({name: results[name]}, {name: expected[name]}) for name in other.statistics
    )


@pytest.mark.several_ranks
@pytest.mark.parametrize("method", METHODS)
def test_statistics_travel_exactly_and_the_first_steps_do(world: World, method: str) -> None:
    exact, replica = Replica(world, "none"), Replica(world, method, after=2)
    for number in range(STEPS):
        exact.step(number)
        replica.step(number)
        assert statistics_differ_by(replica, exact) < BOUND
        assert (distance(replica.results(), exact.results()) == 0) == (number < 2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_step_is_seen_on_all_replicas_and_leaves_no_trace(
    world: World, method: str, value: float
) -> None:
    def spoil(gradients: dict[str, Tensor], number: int) -> None:
        if world.rank == 0:
            gradients["wide.weight"][3, 4] = value

    good, replica = Replica(world, method), Replica(world, method)
    for number in range(3):
        good.step(number)
        replica.step(number)
        replica.step(number, spoil, accepts=False)
        assert not replica.gradients.are_finite()
    good.step(3)
    replica.step(3)
    assert replica.gradients.are_finite()
    assert distance(replica.results(), good.results()) == 0
    assert distance(replica.residuals(), good.residuals()) == 0


@pytest.mark.several_ranks
def test_a_sum_beyond_fp16_is_a_bad_step(world: World) -> None:
    replica = Replica(world, "fp16")

    def grow(gradients: dict[str, Tensor], number: int) -> None:
        gradients["wide.weight"].fill_(60000.0)

    replica.step(0, grow, accepts=False)
    assert not replica.gradients.are_finite()


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_has_the_same_bits(world: World, method: str) -> None:
    whole, first, second = (Replica(world, method, after=1) for _ in range(3))
    for number in range(2 * STEPS):
        whole.step(number)
    for number in range(STEPS):
        first.step(number)
    saved = checkpoint_of(world, first)
    second.gradients.load(wanted(second, saved))
    for number in range(STEPS, 2 * STEPS):
        second.step(number)
    assert distance(second.results(), whole.results()) == 0
    assert distance(second.residuals(), whole.residuals()) == 0
    assert second.gradients.counted()["residual_norm"] > 0 or world.rank == world.size - 1


@pytest.mark.parametrize("method", METHODS)
def test_another_number_of_replicas_keeps_the_sum(world: World, method: str) -> None:
    """The checkpoint is one of one more replica."""
    replica = Replica(world, method)
    for number in range(2):
        replica.step(number)
    saved = checkpoint_of(world, replica)
    sums = total(world, replica.residuals())
    for name, value in sums.items():
        saved[f"residual/{world.size}/{name}"] = torch.as_tensor(value)
    other = Replica(world, method)
    other.gradients.load(wanted(other, saved))
    doubled = {name: 2 * value for name, value in sums.items()}
    assert distance(total(world, other.residuals()), doubled) < BOUND


@pytest.mark.parametrize("method", METHODS)
def test_the_bytes_are_those_of_what_travels(world: World, method: str) -> None:
    replica = Replica(world, method)
    for number in range(3):
        replica.step(number)
    size = world.size
    share = (size - 1) / size
    predicted = 0.0
    for bucket in replica.gradients.buckets:
        shapes = [tuple(parameter.shape) for parameter in bucket.parameters]
        tail = sum(view.numel() for view in bucket.tail)
        count = bucket.flat.numel() - tail
        if method.startswith("powersgd"):
            predicted += 2 * share * 8 * (tail + sum(elements(shape, method) for shape in shapes))
            continue
        predicted += 2 * share * 8 * tail
        if method.startswith("topk"):
            predicted += (size - 1) * math.ceil(0.1 * count) * (8 + 4)
        elif method == "int8":  # a scale of 4 bytes for each 256 values
            predicted += 2 * share * (256 + 4) * math.ceil(count / (256 * size)) * size
        else:
            predicted += 2 * share * 2 * (math.ceil(count / size) * size)
    assert replica.gradients.counted()["sent_bytes"] == pytest.approx(3 * predicted, abs=0.1)


def elements(shape: tuple[int, ...], method: str) -> int:
    """Return the numbers that PowerSGD sends of a parameter."""
    rank, count = int(method[-1]), math.prod(shape)
    if len(shape) < 2 or shape == (1, 23):
        return count
    return rank * (shape[0] + count // shape[0])


@pytest.mark.several_ranks
def test_models_train_with_compressed_sums(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 13 samples with unequal shares and batch norms, on up to two groups of replicas."""
    monkeypatch.setattr(PowerSums, "shrinks", AnyMatrix.shrinks)
    components = components_of("resnet", 8)
    plan = PLANS[world.size][PLAN_OF[world.size]](names(components))
    weights = {}
    for method in ("none", "topk:1", "powersgd:1000", "bf16"):
        settings: dict[str, Any] = {"precision": "fp64", "batch_size": 13, "lr": 0.1, "seed": 3}
        config = TrainConfig(model="resnet", data="", compress=starting(method, 1), **settings)
        runtime = runtime_of(config, plan, components, 8, world)
        for number in range(3):
            run_step(runtime, plan, world, 8, 13, number)
        weights[method] = whole_state(plan, runtime, world)
    assert distance(weights["topk:1"], weights["none"]) < BOUND
    assert distance(weights["powersgd:1000"], weights["none"]) < BOUND
    assert 1e-6 < distance(weights["bf16"], weights["none"]) < 0.1


@pytest.mark.several_ranks
def test_a_skipped_step_changes_neither_weights_nor_residuals(world: World) -> None:
    components = components_of("cnn", 16)
    plan = PLANS[world.size]["dp"](names(components))
    settings: dict[str, Any] = {"compress": "topk:0.1,after=0", "batch_size": 13}
    config = TrainConfig(model="cnn", data="", on_bad_step="skip", **settings)
    runtime = runtime_of(config, plan, components, 16, world)
    (part,) = runtime.parts.values()

    def state() -> dict[str, np.ndarray]:
        tensors = {**part.model.parameters(), **part.gradients.saved()}
        return {name: value.detach().numpy().copy() for name, value in tensors.items()}

    assert not run_step(runtime, plan, world, 16, 13, 0).is_bad
    before, calls = state(), dict(part.model.calls)
    name, call = next(iter(calls.items()))
    if world.rank == 0:
        part.model.calls[name] = lambda inputs: call(inputs) * math.nan
    assert run_step(runtime, plan, world, 16, 13, 1).is_bad
    assert distance(state(), before) == 0
    part.model.calls[name] = call
    assert not run_step(runtime, plan, world, 16, 13, 2).is_bad
    assert distance(state(), before) > 0


def checkpoint_of(world: World, replica: Replica) -> dict[str, Tensor]:
    """Return what all ranks write; no name may be written twice."""
    saved: dict[str, Tensor] = {}
    for theirs in world.gather({k: v.clone() for k, v in replica.gradients.saved().items()}):
        assert not saved.keys() & theirs.keys()
        saved |= theirs
    return saved


def wanted(replica: Replica, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint that a rank reads."""
    shapes = {name: tuple(value.shape) for name, value in saved.items()}
    return {name: saved[name] for name in replica.gradients.wanted(shapes)}
