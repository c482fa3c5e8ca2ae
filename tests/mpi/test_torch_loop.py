"""Steps of a user's own loop, with gradients of all ranks, against the serial loop; and mistakes."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain import torch as distributed
from hvdtrain.data import order
from hvdtrain.world import World

CLASSES, SIZE, COUNT, BATCH = 5, 6, 25, 12  # the last batch of an epoch has a single sample
BOUND = 1e-12
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@pytest.fixture(scope="module", autouse=True)
def place(world: World, horovod: Any) -> Iterator[distributed.Rank]:
    yield distributed.start()
    distributed.stop()


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


def through_layers(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Call the layers, not the model: only its batch is known from the loader."""
    hidden = model.wide(torch.tanh(model.convolution(images)).flatten(1))
    return functional.cross_entropy(model.head(hidden), labels)


def dataset() -> TensorDataset:
    draw = np.random.default_rng(1)
    images = torch.from_numpy(draw.standard_normal((COUNT, 3, SIZE, SIZE)))
    return TensorDataset(images, torch.from_numpy(draw.integers(0, CLASSES, COUNT)))


def global_batches(epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches that one process trains on."""
    samples = dataset()
    for epoch in range(epochs):
        everything = np.arange(COUNT, dtype=np.int64)
        rows = order.epoch_order(everything, f"samples {COUNT}", seed, epoch, 1, COUNT)
        for start, stop in order.step_slices(COUNT, BATCH):
            images, labels = samples[rows[start:stop]]
            yield images, labels


@dataclass(frozen=True)
class Case:
    """A loop: its optimizer, its loss, backwards per step, and the largest norm."""

    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, weight_decay=0.01
    )
    loss: Loss = cross_entropy
    backwards: int = 1
    clip: float | None = None
    scaler: bool = False
    set_to_none: bool = True
    epochs: int = 2


@dataclass
class Trained:
    """Gradients per step by parameter, and the weights at the end."""

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]],
    together: bool,
) -> Trained:
    trained = Trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=case.scaler)
    for number, (images, labels) in enumerate(batches(), 1):
        is_last = number % case.backwards == 0
        with distributed.accumulate(not is_last) if together else nullcontext():
            scaler.scale(case.loss(model, images, labels) / case.backwards).backward()
        if not is_last:
            continue
        scaler.unscale_(optimizer)
        if case.clip is not None:
            clip = distributed.clip_norm_ if together else nn.utils.clip_grad_norm_
            clip(model.parameters(), case.clip)
        trained.gradients.append(
            {
                name: None if value.grad is None else value.grad.clone()
                for name, value in model.named_parameters()
            }
        )
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(case.set_to_none)
    trained.weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    return trained


def serial(case: Case, seed: int) -> Trained:
    model = Net()
    optimizer = case.optimizer(model)
    with distributed.alone():
        return train(
            case, model, optimizer, lambda: global_batches(case.epochs, seed), together=False
        )


def together(case: Case, seed: int, model: nn.Module | None = None) -> Trained:
    model = model or Net()
    model, optimizer = distributed.prepare(model, case.optimizer(model))
    samples = dataset()
    sampler = distributed.sampler(samples, BATCH, seed=seed)
    loader = DataLoader(samples, batch_sampler=sampler)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(case.epochs):
            yield from loader

    return train(case, model, optimizer, batches, together=True)


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


def worst(one: Trained, other: Trained) -> float:
    assert len(one.gradients) == len(other.gradients) > 0
    pairs = zip(one.gradients, other.gradients, strict=True)
    gradients = max(distance(left, right) for left, right in pairs)
    return max(gradients, distance(one.weights, other.weights))


CASES = {
    "uneven batches": Case(),
    "accumulated": Case(backwards=2, epochs=4),
    "clipped, accumulated": Case(backwards=3, clip=0.05, epochs=2),
    "a penalty": Case(loss=with_penalty),
    "scaled": Case(scaler=True, clip=0.05),
    "gradients set to zero": Case(set_to_none=False, backwards=2),
    "adamw": Case(optimizer=lambda model: torch.optim.AdamW(model.parameters(), 1e-3)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_and_weight_is_that_of_the_serial_loop(world: World, name: str) -> None:
    seed = list(CASES).index(name)
    assert worst(together(CASES[name], seed), serial(CASES[name], seed)) <= BOUND
