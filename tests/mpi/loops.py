"""A small model and data for tests of users' own loops, and the distance of gradients."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hvdtrain import torch as distributed
from hvdtrain.data import order
from hvdtrain.torch.reading import Batch, Reading
from hvdtrain.torch.start import current
from hvdtrain.world import World

CLASSES, SIZE, COUNT, BATCH = 5, 6, 28, 13  # the last batch of an epoch has two samples
BOUND = 1e-12
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@pytest.fixture(scope="module", autouse=True)
def place(world: World, horovod: Any) -> Iterator[distributed.Rank]:
    yield distributed.start()
    distributed.stop()


@pytest.fixture(autouse=True)
def from_the_first_epoch(place: distributed.Rank) -> None:
    """Forget how far other tests have read the same samples."""
    current().positions.clear()
    current().readings.clear()


def on_batch(*batch: Any) -> None:
    """Have the next backwards be those of a batch, as a loader does."""
    reading = Reading([Batch(*batch)])
    reading.read = 1
    current().readings = [reading]


class Net(nn.Module):
    """A convolution, a tied, a frozen and an unused layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.convolution = nn.Conv2d(3, 4, 3)
            self.wide = nn.Linear(64, 64)
            self.frozen = nn.Linear(64, 64)
            self.unused = nn.Linear(64, 64)
            self.head = nn.Linear(64, CLASSES)
        self.frozen.requires_grad_(False)
        self.tied = self.wide
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.convolution(images)).flatten(1)
        hidden = torch.tanh(self.tied(torch.tanh(self.wide(hidden))))
        result: Tensor = self.head(torch.tanh(self.frozen(hidden)))
        return result


def cross_entropy(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(images), labels)


def with_penalty(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Add a term that does not pass through the output of the model."""
    weights = [value for value in model.parameters() if value.requires_grad]
    penalty = sum((value.square().sum() for value in weights), torch.zeros(()).double())
    return cross_entropy(model, images, labels) + 0.01 * penalty


def through_layers(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    """Call the layers, not the model: only its batch is known from the loader."""
    hidden = model.wide(torch.tanh(model.convolution(images)).flatten(1))
    return functional.cross_entropy(model.head(hidden), labels)


def dataset(count: int = COUNT) -> TensorDataset:
    draw = np.random.default_rng(1)
    images = torch.from_numpy(draw.standard_normal((count, 3, SIZE, SIZE)))
    return TensorDataset(images, torch.from_numpy(draw.integers(0, CLASSES, count)))


def global_batches(epochs: int, seed: int, count: int = COUNT) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches that one process trains on."""
    samples = dataset(count)
    for epoch in range(epochs):
        everything = np.arange(count, dtype=np.int64)
        rows = order.epoch_order(everything, f"samples {count}", seed, epoch, 1, count)
        for start, stop in order.step_slices(count, BATCH):
            images, labels = samples[rows[start:stop]]
            yield images, labels


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest error of any tensor, relative to it, as plans are compared."""
    assert one.keys() == other.keys()
    assert [name for name in one if (one[name] is None) != (other[name] is None)] == []
    values = {name: value for name, value in other.items() if value is not None}
    largest = max(float(value.abs().max()) for value in values.values())
    return max(
        float((one[name] - value).abs().max())
        / max(float(value.abs().max()), 1e-6 * largest, 1e-300)
        for name, value in values.items()
    )
