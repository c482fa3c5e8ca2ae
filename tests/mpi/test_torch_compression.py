"""Users' own loops whose gradients are compressed."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from hvdtrain import torch as distributed
from hvdtrain.errors import UsageError
from hvdtrain.torch.start import current
from hvdtrain.world import World
from tests.mpi.compression import starting
from tests.mpi.loops import (
    BATCH,
    BOUND,
    Net,
    dataset,
)
from tests.mpi.loops import (
    from_the_first_epoch as from_the_first_epoch,
)
from tests.mpi.loops import (
    place as place,
)
from tests.mpi.test_torch_loop import Case, serial, together, worst

pytestmark = pytest.mark.several_ranks


@pytest.mark.parametrize(("compress", "is_exact"), [("topk:1", True), ("topk:0.1", False)])
def test_a_loop_with_compressed_gradients(
    monkeypatch: pytest.MonkeyPatch, compress: str, is_exact: bool
) -> None:
    """Accumulated gradients in uneven batches, with a GradScaler; all values, or a tenth."""
    prepare = partial(distributed.prepare, compress=starting(compress, 1))
    monkeypatch.setattr(distributed, "prepare", prepare)
    case = Case(backwards=2, scaler=True)
    difference = worst(together(case, seed=5), serial(case, seed=5))
    assert (difference < BOUND) == is_exact


def train(folder: Path, most: int, compress: str) -> list[Tensor]:
    """Continue to train until `most` steps are made, save, and return the weights."""
    distributed.stop()
    distributed.start(device="cpu")
    model: Any = Net()
    made = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer = distributed.prepare(model, made, compress=starting(compress, 1))
    distributed.load(folder)
    samples = dataset()
    loader = DataLoader(samples, batch_sampler=distributed.sampler(samples, BATCH, seed=5))
    while current().models[0].steps < most:
        for images, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            if current().models[0].steps == most:
                break
    distributed.save(folder)
    return [value.detach().clone() for value in model.parameters()]


@pytest.mark.parametrize("compress", ["fp16", "powersgd:1"])
def test_a_resumed_loop_has_the_same_bits(world: World, tmp_path: Path, compress: str) -> None:
    folder: Path = world.broadcast(tmp_path)
    whole = train(folder / "whole", 6, compress)
    exact = train(folder / "exact", 6, "none")
    train(folder / "parts", 3, compress)
    parts = train(folder / "parts", 6, compress)
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(whole, exact, strict=True))


def test_an_unknown_compression_is_refused() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UsageError, match=r"^compress fp8 is not known: use none, fp16"):
        distributed.prepare(model, optimizer, compress="fp8")
    with pytest.raises(UsageError, match="after must be a whole number"):
        distributed.prepare(model, optimizer, compress="fp16,after=-1")
