"""Local steps of a user's own loop: ranks average their weights after every period."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hvdtrain import torch as distributed
from hvdtrain.errors import UsageError
from hvdtrain.world import World
from tests.mpi.loops import BATCH, BOUND, Net, cross_entropy, dataset, distance, global_batches
from tests.mpi.loops import from_the_first_epoch as from_the_first_epoch
from tests.mpi.loops import place as place

pytestmark = pytest.mark.several_ranks


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def are_equal(world: World, model: nn.Module) -> bool:
    everywhere = world.gather({name: value.numpy() for name, value in weights_of(model).items()})
    return all(
        theirs[name].tobytes() == value.tobytes()
        for theirs in everywhere
        for name, value in everywhere[0].items()
    )


def batches(epochs: int) -> Any:
    sampler = distributed.sampler(dataset(), batch_size=BATCH, seed=3)
    loader = DataLoader(dataset(), batch_sampler=sampler)
    for _ in range(epochs):
        yield from loader


def test_a_meeting_after_every_step_is_the_serial_loop(world: World) -> None:
    serial = Net()
    optimizer = optimizer_of(serial)
    for images, labels in global_batches(2, 3):
        optimizer.zero_grad()
        cross_entropy(serial, images, labels).backward()
        with distributed.alone():
            optimizer.step()
    model, optimizer = distributed.prepare(*_made(), sync="local:1")
    for images, labels in batches(2):
        optimizer.zero_grad()
        cross_entropy(model, images, labels).backward()
        optimizer.step()
    assert distance(weights_of(model), weights_of(serial)) <= BOUND
    assert are_equal(world, model)


def test_ranks_differ_until_they_meet(world: World) -> None:
    model, optimizer = distributed.prepare(*_made(), sync="local:4")
    for step, (images, labels) in enumerate(batches(2), 1):
        optimizer.zero_grad()
        cross_entropy(model, images, labels).backward()
        optimizer.step()
        assert are_equal(world, model) == (step == 4)
    distributed.evaluate(model, [(images, labels)])
    assert are_equal(world, model)


def test_all_ranks_leave_out_a_step_whose_gradients_overflow_on_one(world: World) -> None:
    model, optimizer = distributed.prepare(*_made(), sync="local:2")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, (images, labels) in enumerate(batches(2), 1):
        before = weights_of(model)
        optimizer.zero_grad()
        loss = cross_entropy(model, images, labels)
        is_bad = step == 2  # a batch in which every rank has samples
        scaler.scale(loss * (torch.inf if is_bad and world.rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        was_changed = distance(weights_of(model), before) > 0
        assert was_changed != is_bad
        assert scaler.get_scale() == (2.0 if step > 1 else 4.0)
    distributed.evaluate(model, [(images, labels)])
    assert are_equal(world, model)


@pytest.mark.parametrize("sync", ["diloco:4", "local:4@1", "elastic:2"])
def test_other_methods_are_refused(sync: str) -> None:
    with pytest.raises(UsageError, match="use 'exact' or 'local:H'"):
        distributed.prepare(*_made(), sync=sync)


def test_compression_is_refused() -> None:
    with pytest.raises(UsageError, match=r"compress='bf16' needs the sums of every step, .* use"):
        distributed.prepare(*_made(), sync="local:4", compress="bf16")


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    return model, optimizer_of(model)
