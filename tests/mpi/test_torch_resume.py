"""Checkpoints of a user's own loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hvdtrain import torch as distributed
from hvdtrain.errors import DataError, UsageError
from hvdtrain.torch import state
from hvdtrain.world import World
from tests.mpi.packed import (
    BATCH,
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
            if state.current().models[0].steps >= most:
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
