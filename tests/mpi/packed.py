"""A packed data set and a model for tests of users' own loops, on ranks that have just started."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import data as packed
from hvdtrain import torch as distributed
from hvdtrain.world import World

COUNT, BATCH = 61, 16


@pytest.fixture(autouse=True)
def place(world: World, horovod: Any) -> Iterator[distributed.Rank]:
    yield distributed.start(device="cpu")
    distributed.stop()


@pytest.fixture(scope="module")
def folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = world.broadcast(tmp_path_factory.mktemp("data") / "set")
    if world.rank == 0:
        packed.synth(path, COUNT, 5, size=8, seed=1)
    world.barrier()
    return path


def made(seed: int = 0) -> tuple[Any, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Dropout(0.2), nn.Linear(8, 5))
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def backward(model: Any, images: Tensor | None = None) -> None:
    images = torch.ones(4, 3, 8, 8) if images is None else images
    model(images).square().mean().backward()
