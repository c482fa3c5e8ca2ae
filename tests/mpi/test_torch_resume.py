"""Checkpoints of a user's own loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hvdtrain import torch as distributed
from hvdtrain.checkpoint import tensorfile
from hvdtrain.errors import DataError, UsageError
from hvdtrain.torch.start import current
from hvdtrain.world import World
from tests.mpi.packed import (
    BATCH,
    backward,
    made,
)
from tests.mpi.packed import (
    folder as folder,
)
from tests.mpi.packed import (
    place as place,
)


def loop(
    model: nn.Module, optimizer: Any, scheduler: Any, folder: Path, save_to: Path, most: int
) -> None:
    """Train until `most` steps are made, over all starts."""
    loader = distributed.loader(folder, BATCH, seed=7, augment="crop-flip")
    while True:
        batches = distributed.steps(loader, save_to, every=3, scheduler=scheduler)
        for images, labels in batches:
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            scheduler.step()
            if current().models[0].steps >= most:
                return


def test_a_loop_resumes_to_the_same_bits(world: World, folder: Path, tmp_path: Path) -> None:
    """Six steps at once, or three, a checkpoint and three more; one checkpoint is in mid-epoch."""
    save_to: Path = world.broadcast(tmp_path)
    weights = []
    for name, lives in (("whole", [6]), ("parts", [4, 6])):
        torch.manual_seed(world.rank)  # dropout differs between ranks, and continues
        for most in lives:
            distributed.stop()
            distributed.start(device="cpu")
            model, optimizer = distributed.prepare(*made())
            scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
            loaded = distributed.load(save_to / name, scheduler=scheduler)
            assert (loaded is None) == (most == lives[0])
            loop(model, optimizer, scheduler, folder, save_to / name, most)
        weights.append([value.detach().clone() for value in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_what_does_not_fit_a_checkpoint_is_refused(
    world: World, folder: Path, tmp_path: Path
) -> None:
    save_to: Path = world.broadcast(tmp_path)
    model, optimizer = distributed.prepare(*made())
    for images, labels in distributed.loader(folder, BATCH):
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    path = distributed.save(save_to)
    with pytest.raises(UsageError, match="was saved without scheduler: give the same objects"):
        distributed.load(save_to, scheduler=optimizer)
    with pytest.raises(UsageError, match="scheduler is a int, which has no state_dict"):
        distributed.save(save_to, scheduler=1)
    assert distributed.load(save_to) == path
    with pytest.raises(UsageError, match="trained on other data than a data set"):
        next(iter(distributed.loader(folder, BATCH, seed=1)))
    distributed.stop()
    distributed.start(device="cpu")
    other = nn.Sequential(nn.Flatten(), nn.Linear(192, 9), nn.Dropout(0.2), nn.Linear(9, 5))
    distributed.prepare(other, torch.optim.AdamW(other.parameters(), 0.01))
    with pytest.raises(UsageError, match=r"of another model: 1\.weight is 8 x 192 in the checkp"):
        distributed.load(save_to)
    world.barrier()
    if world.rank == 0:
        part = path / "part-0000.safetensors"
        part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="holds no checkpoint that verifies"):
        distributed.load(save_to)


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def test_a_model_that_is_prepared_again_keeps_its_steps_and_its_place(
    world: World, tmp_path: Path
) -> None:
    """The first of two models is prepared again, and the next save is the newest checkpoint."""
    save_to: Path = world.broadcast(tmp_path)
    one, other = made(1), made(2)
    distributed.prepare(*one)
    distributed.prepare(*other)
    for _ in range(2):
        step(*one)
    distributed.save(save_to, keep=1)
    before = len(current().undo)
    one[0][1].requires_grad_(False)
    distributed.prepare(*one)
    assert len(current().undo) == before
    step(*one)
    assert distributed.save(save_to, keep=1).name == "step-00000003"
    assert [item.model for item in current().models] == [one[0], other[0]]
    wanted = one[0][3].weight.detach().clone()
    step(*one)
    assert distributed.load(save_to) == save_to / "step-00000003"
    assert torch.equal(one[0][3].weight, wanted)


def test_a_folder_of_another_run_is_refused_unless_it_was_loaded(
    world: World, tmp_path: Path
) -> None:
    save_to: Path = world.broadcast(tmp_path)
    pair = distributed.prepare(*made())
    for _ in range(2):
        step(*pair)
    distributed.save(save_to)
    world.barrier()
    distributed.stop()
    distributed.start(device="cpu")
    pair = distributed.prepare(*made())
    step(*pair)
    with pytest.raises(UsageError, match="step-00000002 is newer than step 1 of this program"):
        distributed.save(save_to)
    with pytest.raises(UsageError, match="step-00000002 is newer than step 1 of this program"):
        next(distributed.steps([0], save_to))
    distributed.load(save_to)
    assert next(distributed.steps([0], save_to)) == 0
    step(*pair)
    assert distributed.save(save_to).name == "step-00000003"


def test_a_data_set_may_be_opened_after_that_of_the_checkpoint(
    world: World, folder: Path, tmp_path: Path
) -> None:
    """The second phase of a training uses another order than the first one."""
    save_to: Path = world.broadcast(tmp_path)
    model, optimizer = distributed.prepare(*made())
    for images, labels in distributed.loader(folder, BATCH):
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    distributed.save(save_to)
    distributed.load(save_to)
    assert distributed.loader(folder, BATCH).epoch == 1
    assert distributed.loader(folder, BATCH, seed=1).epoch == 0


def test_other_objects_may_be_larger_than_a_manifest(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averaged weights of 5 million parameters once made a checkpoint that could not be read."""
    save_to: Path = world.broadcast(tmp_path)
    monkeypatch.setattr(tensorfile, "LARGEST_MANIFEST", 10_000)
    model, optimizer = distributed.prepare(*made())
    backward(model)
    optimizer.step()
    average = nn.Linear(100, 100)
    expected = world.broadcast(average.weight.detach().clone())  # rank 0's is saved
    path = distributed.save(save_to, average=average)
    nn.init.zeros_(average.weight)
    assert distributed.load(save_to, average=average) == path
    assert torch.equal(average.weight, expected)
