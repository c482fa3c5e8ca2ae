"""Negative controls: `check_plan` reports the results of a runtime with an injected fault."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hvdtrain.backends.pytorch import agreement, parts
from hvdtrain.check import plan
from hvdtrain.check.parity import Parity
from hvdtrain.check.plan import check_plan
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.parallel import halves
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.schedule import Program, program_of
from hvdtrain.sync import collectives
from hvdtrain.sync.collectives import HorovodCollectives
from hvdtrain.sync.gradients import ReplicatedGradients
from hvdtrain.world import World
from tests.mpi.common import CLASSES, components_of, names
from tests.mpi.plans import PLANS

SIZE = 16
SEEN = 1e-3  # larger than any rounding error in fp64


def check(world: World, plan: str, model: str = "cnn", batch_size: int = 13) -> Parity:
    components = components_of(model, SIZE)
    config = TrainConfig(model=model, data="", precision="fp64", batch_size=batch_size)
    made = PLANS[world.size][plan](names(components))
    return check_plan(config, components, made, SIZE, CLASSES, world)


def faulty(change: Callable[[Tensor, str], Any] | None, operation: str) -> Any:
    """Return a replacement of `HorovodCollectives` with a fault."""

    class Faulty(HorovodCollectives):
        def all_reduce(self, tensor: Tensor, name: str) -> Any:
            return self.horovod.allreduce_async_(
                change(tensor, name) if change else tensor,
                name=f"{self.name}.{name}",
                op=getattr(self.horovod, operation),
                process_set=self.process_set,
            )

    return Faulty


def left_out(tensor: Tensor, bucket: str) -> Tensor:
    return tensor.clone() if bucket == "gradients.1" else tensor


@pytest.mark.usefixtures("horovod")
@pytest.mark.several_ranks
@pytest.mark.parametrize(
    ("change", "operation"), [(None, "Average"), (left_out, "Sum"), (None, "Sum")]
)
def test_a_wrong_reduction(
    world: World, monkeypatch: pytest.MonkeyPatch, change: Any, operation: str
) -> None:
    monkeypatch.setattr(collectives, "HorovodCollectives", faulty(change, operation))
    small = partial(ReplicatedGradients, bucket_bytes=100_000)
    monkeypatch.setattr(agreement, "ReplicatedGradients", small)
    parity = check(world, "dp")
    is_faulty = change is not None or operation != "Sum"
    assert (parity.largest > SEEN or parity.largest != parity.largest) == is_faulty, parity


def test_a_microbatch_that_is_left_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_first_backward(plan: Plan, size: int, rank: int, is_training: bool) -> Program:
        made = program_of(plan, size, rank, is_training)
        if rank != world.size - 1:
            return made
        dropped = next(task for task in made.tasks if task.action.kind == "B")
        return replace(made, tasks=tuple(task for task in made.tasks if task is not dropped))

    monkeypatch.setattr(plan, "program_of", without_first_backward)
    assert check(world, "dp" if world.size > 1 else "single").largest > SEEN


def test_microbatches_of_which_only_the_last_counts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in NeMo Automodel issue 3530, where the loss looked fine.
    from hvdtrain.parallel.runtime import Runtime

    whole = Runtime._backward

    def forgetful(self: Runtime, step: Any, task: Any) -> None:
        for parameter in self.parts[task.key[0]].parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        whole(self, step, task)

    monkeypatch.setattr(Runtime, "_backward", forgetful)
    assert check(world, list(PLANS[world.size])[1]).largest > SEEN


@pytest.mark.several_ranks
@pytest.mark.parametrize("direction", ["activations", "gradients"])
def test_a_stage_that_is_given_zeros(
    world: World, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    # As in piper issue 15: training ran on zeros, and the loss went down.
    send = Exchange.send

    def zeros(self: Exchange, rows: Tensor, receiver: int, tag: int) -> None:
        forward = receiver > world.rank
        wrong = forward == (direction == "activations")
        send(self, torch.zeros_like(rows) if wrong else rows, receiver, tag)

    monkeypatch.setattr(Exchange, "send", zeros)
    assert check(world, "mp").largest > SEEN


@pytest.mark.several_ranks
def test_samples_that_are_swapped_on_their_way(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Exchange.send

    def flipped(self: Exchange, rows: Tensor, receiver: int, tag: int) -> None:
        send(self, rows.flip(0) if receiver > world.rank else rows, receiver, tag)

    monkeypatch.setattr(Exchange, "send", flipped)
    assert check(world, "mp").largest > SEEN


@pytest.fixture
def other_cuts() -> Iterator[None]:
    """Clear the caches of cuts before and after the test."""
    for made in (cut, program_of):
        made.cache_clear()
    yield
    for made in (cut, program_of):
        made.cache_clear()


@pytest.mark.usefixtures("other_cuts")
def test_a_sample_that_the_cut_leaves_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = order.replica_rows

    def without_the_last(start: int, stop: int, *others: Any) -> list[list[order.Range]]:
        replicas = whole(start, stop, *others)
        return [[(first, min(last, stop - 1)) for first, last in rows] for rows in replicas]

    monkeypatch.setattr(order, "replica_rows", without_the_last)
    assert check(world, next(iter(PLANS[world.size]))).largest > SEEN


@pytest.mark.several_ranks
@pytest.mark.parametrize("kept", ["running_mean", "num_batches_tracked"])
def test_a_replica_that_keeps_its_own_running_statistics(
    world: World, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    # A checkpoint would not show it: it holds the statistics of the first replica only.
    whole = ReplicatedGradients.finish

    def selfish(self: ReplicatedGradients) -> Any:
        seconds = whole(self)
        for value in self.statistics if world.rank == world.size - 1 else ():
            if value.is_floating_point() == (kept == "running_mean"):
                value += 1
        return seconds

    monkeypatch.setattr(ReplicatedGradients, "finish", selfish)
    parity = check(world, "dp", "resnet", 26)
    assert parity.statistics > SEEN
    assert "the buffer " in parity.fault


@pytest.mark.several_ranks
def test_a_replica_that_makes_another_update(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = parts.make_optimizer

    def slower(config: TrainConfig, *others: Any) -> torch.optim.Optimizer:
        wrong = replace(config, weight_decay=0.1)
        return whole(wrong if world.rank == world.size - 1 else config, *others)

    monkeypatch.setattr(parts, "make_optimizer", slower)
    parity = check(world, "dp")
    assert parity.update > SEEN
    assert "the update of " in parity.fault or "the gradient of " in parity.fault


@pytest.mark.several_ranks
def test_a_half_of_a_backward_that_is_left_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = halves.backward_weight
    monkeypatch.setattr(halves, "backward_weight", lambda groups: whole(groups[1:]))
    plan = next(name for name in PLANS[world.size] if "zb-h1" in name)
    assert check(world, plan).largest > SEEN
