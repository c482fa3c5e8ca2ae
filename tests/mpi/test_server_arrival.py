"""Parameter servers that update on arrival: against a serial replay, and their staleness."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.backends.pytorch.parts import make_optimizer, set_learning_rate
from hvdtrain.check.plan import local_batch, random_batch
from hvdtrain.config import TrainConfig
from hvdtrain.parallel.runtime import Step
from hvdtrain.plan.cut import Share, cut
from hvdtrain.plan.plan import Plan, replicated
from hvdtrain.plan.schedule import program_of
from hvdtrain.sync.server import ArrivingUpdates, Push, PushedGradients, Server, Wire, Worker
from hvdtrain.sync.states import Slice
from hvdtrain.world import World, communicator_among, communicator_for
from tests.mpi.apart import (
    ALONE,
    BOUND,
    EPOCH,
    SEEN,
    SIZE,
    Weights,
    config_of,
    difference,
)
from tests.mpi.common import CLASSES, components_of, names, on_first, runtime_of
from tests.mpi.served import OPTIMIZERS, Delayed, Served, trained, workers

pytestmark = pytest.mark.several_ranks


Taken = list[tuple[int, Push]]


def recorded(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """Return a list to which a server adds the pushes in the order of their updates."""
    taken: Taken = []
    take = ArrivingUpdates.take

    def record(self: ArrivingUpdates, worker: int, push: Push, gradients: Any) -> None:
        if gradients is not None:
            taken.append((worker, push))
        take(self, worker, push, gradients)

    monkeypatch.setattr(ArrivingUpdates, "take", record)
    return taken


def replayed(config: TrainConfig, plan: Plan, taken: Taken) -> Weights:
    """Return the parameters after updates in this order, computed by one process."""
    components = components_of(config.model, SIZE)
    alone = replicated(names(components), 1, 2, None)
    exact = replace(config, sync="exact")
    runtime = runtime_of(exact, alone, components, SIZE, ALONE)
    runtime.observer.close()
    part = runtime.parts[0]
    assert part.optimizer is not None

    def copies() -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in part.model.parameters().items()}

    versions = [copies()]
    for worker, push in taken:
        number = push.step - 1
        size = EPOCH[number % len(EPOCH)]
        batch = random_batch(size, SIZE, CLASSES, number)
        images, labels = local_batch(plan, cut(plan, size), worker, *batch)
        part.model.put(versions[push.version])
        todo = program_of(alone, len(labels), 0, True)
        gradients = runtime.gradients(Step(todo, images, labels))
        part.model.put(versions[-1])
        for name, value in part.model.parameters().items():
            value.grad = gradients[name]
        delay = len(versions) - 1 - push.version
        share = len(labels) / size
        by_delay = config.sync == "server:async"
        factor = 1 / max(1, delay) if by_delay else share
        set_learning_rate(part.optimizer, config.lr / (1 + number) * factor)
        part.optimizer.step()
        part.gradients.zero()
        versions.append(copies())
    return {name: value.numpy() for name, value in versions[-1].items()}


def distance_from_replay(
    world: World, monkeypatch: pytest.MonkeyPatch, sync: str, **options: Any
) -> float:
    plan = workers(world, 1)
    config = config_of(sync, **options)
    taken = recorded(monkeypatch)
    trainer = Delayed(config, plan, components_of("cnn", SIZE), world)
    trainer.train(0, 9)
    trainer.meet()
    taken = world.broadcast(taken, world.size - 1)
    whole = trainer.whole()
    expected = on_first(world, lambda: replayed(config, plan, taken))
    return difference({name: whole[name] for name in expected}, expected)


@pytest.mark.parametrize("options", OPTIMIZERS)
@pytest.mark.parametrize("sync", ["server:stale=1", "server:stale=3", "server:async"])
def test_updates_on_arrival_are_those_of_a_serial_replay(
    world: World, monkeypatch: pytest.MonkeyPatch, sync: str, options: dict[str, Any]
) -> None:
    assert distance_from_replay(world, monkeypatch, sync, **options) <= BOUND


def test_an_update_at_another_rate_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = ArrivingUpdates.update
    monkeypatch.setattr(
        ArrivingUpdates, "update", lambda self, flats, rate: update(self, flats, rate * 1.01)
    )
    assert distance_from_replay(world, monkeypatch, "server:stale=1") > SEEN


@pytest.mark.parametrize("sync", ["server:stale=2", "server:async"])
def test_one_worker_makes_the_exact_run(world: World, sync: str) -> None:
    servers = world.size - 1
    expected = trained(world, "exact", servers)
    assert difference(trained(world, sync, servers), expected) <= BOUND


def counting(world: World, staleness: int | None, steps: int, slow: int) -> tuple[int, float]:
    """Let workers count their steps in the weights, with random delays.

    Each worker adds one to its own parameter in each step. So the weights themselves say how many
    steps of each worker they contain.

    Args:
        slow: the worker whose delays are long.

    Returns:
        The most steps of another worker that this worker's weights missed, and what it counted.
    """
    everyone, count = tuple(range(world.size)), world.size - 1
    communicator_among(everyone)
    wire = Wire(communicator_for(everyone, "servers"))
    value = nn.Parameter(torch.zeros(count, dtype=torch.float64))
    held = Slice({"counts": value})
    if world.rank == count:
        optimizer = make_optimizer(config_of(momentum=0.0, weight_decay=0.0), held.named)
        updates = ArrivingUpdates(held, optimizer, lambda push, delay: 1.0)
        server = Server(held, updates, wire, count, staleness)
        for step in range(steps):
            server.after_step(step + 1)
        server.meet()
        assert value.tolist() == [float(steps)] * count
        world.barrier()
        return 0, 0.0
    gradients = PushedGradients({"counts": value})
    worker = Worker(gradients, [held], [count], wire, count, staleness)
    draw, most = np.random.default_rng(world.rank), 0
    for step in range(steps):
        time.sleep(draw.uniform(0, 0.01 if world.rank == slow else 0.001))
        if world.rank == slow and step == 5:
            time.sleep(0.4)  # the others run ahead as far as they may, also on a busy machine
        value.grad = torch.zeros(count, dtype=torch.float64)
        value.grad[world.rank] = -1.0
        gradients.share = Share(1.0, True, 1)
        worker.push(1.0)
        worker.after_step(step + 1)
        assert float(value[world.rank].detach()) == step + 1, "its own steps are never missed"
        most = max(most, step + 1 - int(value.detach().min()))
    worker.meet()
    assert value.tolist() == [float(steps)] * count
    world.barrier()
    return most, worker.counted()["max_staleness"]


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_weights_never_miss_more_steps_than_the_bound(world: World, staleness: int) -> None:
    most, counted = counting(world, staleness, 25, slow=0)
    everywhere = world.gather((most, counted))
    assert all(seen <= staleness and seen == told for seen, told in everywhere)
    if world.size > 2:  # the bound is reached: it is not met by chance
        assert max(seen for seen, _ in everywhere) == staleness


def test_without_a_bound_workers_run_ahead(world: World) -> None:
    most, counted = counting(world, None, 25, slow=0)
    everywhere = world.gather((most, counted))
    assert all(seen == told for seen, told in everywhere)
    assert (max(seen for seen, _ in everywhere) > 5) == (world.size > 2)


def test_a_server_that_never_lets_workers_wait_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "_may_continue", lambda self, worker: True)
    most, _ = counting(world, 1, 25, slow=0)
    assert (max(world.gather(most)) > 1) == (world.size > 2)


@pytest.mark.parametrize("sync", ["server:stale=2", "server:async"])
def test_at_meetings_all_ranks_hold_the_same_weights_and_statistics(
    world: World, sync: str
) -> None:
    plan = workers(world, 1, "resnet")
    components = components_of("resnet", SIZE)
    trainer = Delayed(config_of(sync, "resnet"), plan, components, world, (40, 40))
    trainer.train(0, 3)  # with the checks of a meeting after two
    assert all(meeting.differ for meeting in trainer.meetings)
    arrays = trainer.share()  # a checkpoint is a meeting
    assert not any(meeting.differ for meeting in trainer.meetings)
    whole = trainer.whole()
    assert all(np.array_equal(arrays[f"model/{name}"], whole[name]) for name in whole)
    again = Served(trainer.config, plan, components, world, (40, 40))
    again.restore(arrays)
    assert difference(again.whole(), whole) == 0
    again.train(3, 5)


def test_bad_gradients_on_arrival_leave_the_weights(world: World) -> None:
    count = world.size - 1
    trainer = Served(
        config_of("server:async"), workers(world, 1), components_of("cnn", SIZE), world
    )
    before = trainer.whole()
    for part in trainer.runtime.parts.values():
        if world.rank < count:
            part.gradients.are_finite = lambda: False  # type: ignore[method-assign]
    trainer.step(0)
    assert difference(trainer.whole(), before) == 0
    trainer.meet()
