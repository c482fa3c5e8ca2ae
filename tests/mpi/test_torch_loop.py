"""Steps of a user's own loop, with gradients of all ranks, against the serial loop."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain import torch as distributed
from hvdtrain.data import order
from hvdtrain.errors import CheckFailed
from hvdtrain.torch import state
from hvdtrain.torch.gradients import Replica
from hvdtrain.torch.reduction import Reduction
from hvdtrain.torch.sampler import BatchOrder
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
    state.current().positions.clear()
    state.current().sampler = None


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
    count: int = COUNT


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
            *(case, model, optimizer),
            lambda: global_batches(case.epochs, seed, case.count),
            together=False,
        )


def together(case: Case, seed: int, model: nn.Module | None = None) -> Trained:
    model = model or Net()
    model, optimizer = distributed.prepare(model, case.optimizer(model))
    samples = dataset(case.count)
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
    "a last batch of one sample": Case(count=27),
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


def plain_average(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """Weight all ranks alike, as an average of the ranks' means does."""
    monkeypatch.setattr(state.Batch, "weight", property(lambda batch: 1 / world.size))


def placeholders_count(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr(BatchOrder, "size_of_next", lambda self, samples: samples)
    monkeypatch.setattr(BatchOrder, "check_total", lambda self, total: None)


def ranks_alone(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr(Reduction, "start", lambda self, share: None)
    monkeypatch.setattr(Reduction, "announce", lambda self, share: None)
    monkeypatch.setattr(Reduction, "finish", lambda self: None)
    monkeypatch.setattr(Reduction, "fingerprint", lambda self, backward: 0)


def each_backward_averaged(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """Average in each backward of a step, as without `accumulate`."""
    monkeypatch.setattr(Replica, "_start_window", Replica._continue_window)
    monkeypatch.setattr(distributed, "accumulate", lambda active: nullcontext())


def clipped_by_rank(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """Clip by a norm of this rank's samples alone."""

    def clip(parameters: Any, largest: float) -> None:
        factor = 1 + 0.1 * world.rank / world.size
        nn.utils.clip_grad_norm_(parameters, largest * factor)

    monkeypatch.setattr(distributed, "clip_norm_", clip)


FAULTS = {
    plain_average: Case(),
    placeholders_count: Case(),
    ranks_alone: Case(),
    each_backward_averaged: Case(backwards=2),
    clipped_by_rank: Case(clip=0.05),
}


@pytest.mark.several_ranks
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_comparison_finds_a_fault(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    if fault is placeholders_count and world.size == 2:
        return  # with two ranks a placeholder is the only sample of its batch
    case = FAULTS[fault]
    reference = serial(case, 0)
    fault(monkeypatch, world)
    error = 0.0
    with suppress(CheckFailed):  # the ranks' weights may differ by then: that is a find too
        error = worst(together(case, 0), reference)
        assert max(world.gather(error)) > 1e-4


def part_of(world: World, model: Any, images: Tensor) -> Tensor:
    """Return the output of a model that uses another layer on each rank."""
    hidden = torch.tanh(model.convolution(images)).flatten(1)
    layer = model.wide if world.rank % 2 else model.unused
    result: Tensor = model.head(layer(hidden))
    return result


@pytest.mark.several_ranks
def test_a_layer_that_some_ranks_do_not_use_gets_the_gradient_of_the_others(world: World) -> None:
    images, labels = dataset()[:]
    parts = order.split(COUNT, [1] * world.size)
    model, reference = Net(), Net()
    for rank, (first, last) in enumerate(parts):
        one = World("mpirun", rank, world.size, 0, 1, 1)
        output = part_of(one, reference, images[first:last])
        (functional.cross_entropy(output, labels[first:last], reduction="sum") / COUNT).backward()
    model, _ = distributed.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    state.current().batch = batch_of(world, parts)
    first, last = parts[world.rank]
    functional.cross_entropy(
        part_of(world, model, images[first:last]), labels[first:last]
    ).backward()
    state.current().batch = None
    gradients = [
        {name: value.grad for name, value in one.named_parameters()} for one in (model, reference)
    ]
    assert distance(*gradients) <= BOUND


def batch_of(world: World, parts: list[tuple[int, int]]) -> state.Batch:
    first, last = parts[world.rank]
    return state.Batch(last - first, COUNT, 0)


class Statistics(nn.Module):
    """A batch norm, a buffer that counts forwards, and one that forward replaces."""

    counter: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=1.0).double()
        self.register_buffer("counter", torch.zeros(1, dtype=torch.long))
        self.register_buffer("largest", torch.zeros(()).double())

    def forward(self, images: Tensor) -> Tensor:
        self.counter += 1
        self.largest = images.detach().max()
        result: Tensor = self.norm(images)
        return result.mean(dim=(2, 3))


def test_buffers_are_the_same_on_all_ranks(world: World) -> None:
    """Running means are weighted by samples; other buffers are those of one rank."""
    model: Any = Statistics()
    model, optimizer = distributed.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    samples = dataset()
    loader = DataLoader(samples, batch_sampler=distributed.sampler(samples, BATCH, seed=9))
    for (images, labels), (whole, _) in zip(loader, global_batches(1, 9), strict=True):
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels % 3).backward()
        optimizer.step()
        assert torch.allclose(model.norm.running_mean, whole.mean(dim=(0, 2, 3)), atol=1e-12)
        everywhere = world.gather([value.clone() for value in model.buffers()])
        assert all(
            torch.equal(value, first)
            for values in everywhere
            for value, first in zip(values, everywhere[0], strict=True)
        )


def test_a_model_of_two_dtypes_and_reentrant_checkpoints_is_averaged(world: World) -> None:
    def made() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return Reentrant()

    reference, model = made(), made()
    model, optimizer = distributed.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    samples = dataset()
    loader = DataLoader(samples, batch_sampler=distributed.sampler(samples, BATCH, seed=4))
    for (images, labels), (whole, targets) in zip(loader, global_batches(1, 4), strict=True):
        reference.zero_grad()
        functional.cross_entropy(reference(whole), targets).backward()
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        gradients = [
            {name: value.grad for name, value in one.named_parameters()}
            for one in (model, reference)
        ]
        assert distance(*gradients) <= 1e-5  # half of the model is in fp32


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * SIZE * SIZE, 8)
        self.second = nn.Linear(8, CLASSES).double()

    def forward(self, images: Tensor) -> Tensor:
        inputs = images.flatten(1).float().requires_grad_()
        hidden = checkpoint(self.first, inputs, use_reentrant=True)
        result: Tensor = checkpoint(self.second, hidden.double(), use_reentrant=True)
        return result


def test_two_models_with_optimizers_of_their_own_are_averaged(world: World) -> None:
    """Each model has backwards and steps of its own, like the two of a GAN."""
    pair = [Net(seed) for seed in (1, 2)]
    references = [Net(seed) for seed in (1, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in pair]
    for model, optimizer in zip(pair, optimizers, strict=True):
        distributed.prepare(model, optimizer)
    folds = order.split(BATCH + 1, [1] * world.size)
    first, last = folds[world.rank]
    images, labels = dataset()[: BATCH + 1]
    for _ in range(2):
        for model, optimizer, reference in zip(pair, optimizers, references, strict=True):
            optimizer.zero_grad()
            cross_entropy(model, images[first:last], labels[first:last]).backward()
            optimizer.step()
            reference.zero_grad()
            cross_entropy(reference, images, labels).backward()
            for value in reference.parameters():
                if value.grad is not None:
                    value.data -= 0.1 * value.grad
    for model, reference in zip(pair, references, strict=True):
        assert (
            distance(dict(model.named_parameters()), dict(reference.named_parameters())) <= BOUND
        )


def test_a_backward_through_two_models_averages_each(world: World) -> None:
    """The loss of a generator passes through the discriminator."""
    images, labels = dataset()[:BATCH]
    first, last = order.split(BATCH, [1] * world.size)[world.rank]
    gradients = []
    for is_prepared in (True, False):
        pair: list[Any] = [Net(1), nn.Linear(CLASSES, CLASSES).double()]
        nn.init.eye_(pair[1].weight)
        nn.init.zeros_(pair[1].bias)
        for model in pair if is_prepared else ():
            distributed.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        share = slice(first, last) if is_prepared else slice(None)
        output = pair[1](torch.tanh(pair[0](images[share])))
        functional.cross_entropy(output, labels[share]).backward()
        gradients.append(
            {
                f"{place}.{name}": value.grad
                for place, model in enumerate(pair)
                for name, value in model.named_parameters()
            }
        )
    assert distance(*gradients) <= BOUND


def test_copies_and_gradients_outside_of_backward_are_left_alone(world: World) -> None:
    model: Any = Net()
    model, optimizer = distributed.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    images, labels = dataset()[:4]
    other: Any = copy.deepcopy(model)
    other_loss = cross_entropy(other, images, labels)
    other_loss.backward()
    (gradient,) = torch.autograd.grad(cross_entropy(model, images, labels), [model.head.weight])
    assert all(value.grad is None for value in model.parameters())
    assert torch.equal(gradient, other.head.weight.grad)
    cross_entropy(model, images, labels).backward()
    averaged: Any = model.head.weight.grad
    torch.autograd.grad(cross_entropy(model, images, labels), [model.head.weight])
    assert averaged is not None
    assert model.head.weight.grad is averaged
    optimizer.step()
