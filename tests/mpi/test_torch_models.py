"""Models in a user's own loop: unused layers, buffers, dtypes, checkpoints, several models."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from hvdtrain import torch as distributed
from hvdtrain.data import order
from hvdtrain.torch.start import current
from hvdtrain.world import World
from tests.mpi.loops import (
    BATCH,
    BOUND,
    CLASSES,
    COUNT,
    SIZE,
    Net,
    cross_entropy,
    dataset,
    distance,
    global_batches,
    on_batch,
    through_layers,
)
from tests.mpi.loops import (
    from_the_first_epoch as from_the_first_epoch,
)
from tests.mpi.loops import (
    place as place,
)


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
    first, last = parts[world.rank]
    on_batch(last - first, COUNT)
    functional.cross_entropy(
        part_of(world, model, images[first:last]), labels[first:last]
    ).backward()
    current().readings.clear()
    gradients = [
        {name: value.grad for name, value in one.named_parameters()} for one in (model, reference)
    ]
    assert distance(*gradients) <= BOUND


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


@pytest.mark.parametrize("is_generator_first", [True, False])
def test_the_position_of_a_gan_is_that_of_its_batches(
    world: World, is_generator_first: bool
) -> None:
    """The second model has two backwards per batch of its own, and one through the first."""
    generator, critic = (nn.Linear(3 * SIZE * SIZE, 3 * SIZE * SIZE).double(), Net())
    optimizers = {model: torch.optim.SGD(model.parameters(), 0.1) for model in (generator, critic)}
    for model in (generator, critic) if is_generator_first else (critic, generator):
        distributed.prepare(model, optimizers[model])
    sampler = distributed.sampler(samples := dataset(26 + world.size), BATCH)
    position = 0
    for images, labels in DataLoader(samples, batch_sampler=sampler):
        fake = generator(images.flatten(1)).view(images.shape)
        optimizers[critic].zero_grad()
        with distributed.accumulate():
            cross_entropy(critic, images, labels).backward()
        cross_entropy(critic, fake.detach(), labels).backward()
        optimizers[critic].step()
        optimizers[critic].zero_grad()
        optimizers[generator].zero_grad()
        cross_entropy(critic, fake, labels).backward()
        optimizers[generator].step()
        optimizers[critic].zero_grad()
        position = min(position + BATCH, len(samples))
        assert sampler.position == position
    assert sampler.epoch == 1


def test_the_position_in_batches_that_are_cut_is_that_of_their_steps(world: World) -> None:
    """A worker reads ahead of the loop."""
    model, optimizer = distributed.prepare((m := Net()), torch.optim.SGD(m.parameters(), 0.1))
    samples = dataset(8 * 2 * world.size)
    sampler = distributed.sampler(samples, 2 * world.size)
    loader = DataLoader(samples, batch_sampler=sampler, num_workers=1, prefetch_factor=4)
    for number, (images, labels) in enumerate(loader, 1):
        optimizer.zero_grad()
        with distributed.accumulate():
            cross_entropy(model, images[:1], labels[:1]).backward()
        cross_entropy(model, images[1:], labels[1:]).backward()
        optimizer.step()
        if number < 4:  # then the worker has read the whole epoch
            assert sampler.position == number * 2 * world.size
    assert sampler.position == len(samples)


def test_layers_that_are_called_directly_are_averaged_with_a_loader(world: World) -> None:
    """Nothing but the loader then knows how many samples a rank has."""
    images, labels = dataset()[:BATCH]
    parts = order.split(BATCH, [1] * world.size)
    first, last = parts[world.rank]
    reference: Any = Net()
    through_layers(reference, images, labels).backward()
    model, _ = distributed.prepare((model := Net()), torch.optim.SGD(model.parameters(), 0.1))
    on_batch(last - first, BATCH)
    through_layers(model, images[first:last], labels[first:last]).backward()
    current().readings.clear()
    gradients = [
        {name: value.grad for name, value in one.named_parameters()} for one in (model, reference)
    ]
    assert distance(*gradients) <= BOUND


@pytest.mark.parametrize(
    "kind", ["in evaluation mode", "in a list", "compiled", "with a step in between"]
)
def test_a_share_counts_by_its_samples_however_the_model_is_called(
    world: World, kind: str
) -> None:
    """No loader or sampler knows the size of the batch: only the forward does."""
    images, labels = dataset()[:BATCH]
    first, last = order.split(BATCH, [1] * world.size)[world.rank]
    model: Any = nn.ModuleList([Net()]) if kind == "in a list" else Net()
    called = model[0] if kind == "in a list" else model
    reference = Net()
    # Its step changes no weight of the loss.
    _, optimizer = distributed.prepare(model, torch.optim.SGD(called.unused.parameters(), 0.1))
    called.train(kind != "in evaluation mode")
    forward: Any = called
    if kind == "compiled":
        forward = torch.compile(called, backend="eager", dynamic=True)
    loss = cross_entropy(forward, images[first:last], labels[first:last])
    if kind == "with a step in between":
        cross_entropy(called, images[:1], labels[:1]).backward()
        optimizer.step()
        model.zero_grad()
    loss.backward()
    cross_entropy(reference, images, labels).backward()
    gradients = [
        {name: value.grad for name, value in one.named_parameters()} for one in (called, reference)
    ]
    assert distance(*gradients) <= BOUND


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
