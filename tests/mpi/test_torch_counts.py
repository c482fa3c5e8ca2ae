"""The weight of a rank in a user's own loop: a sampler counts, or the user gives it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

from hvdtrain import torch as distributed
from hvdtrain.errors import UsageError
from hvdtrain.torch.reading import Reading
from hvdtrain.torch.start import current
from hvdtrain.world import World
from tests.mpi.loops import (
    BATCH,
    BOUND,
    CLASSES,
    COUNT,
    Loss,
    Net,
    cross_entropy,
    dataset,
    distance,
    global_batches,
)
from tests.mpi.loops import (
    from_the_first_epoch as from_the_first_epoch,
)
from tests.mpi.loops import (
    place as place,
)

WEIGHTS = torch.tensor([1.0, 5.0, 0.2, 2.0, 0.0]).double()


class Reshaped(Net):
    """Takes images whose first dimension is not that of the samples, and more tensors before."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(inputs[-1].transpose(0, 1))


def time_major(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(images.transpose(0, 1)), labels)


def weights_first(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(WEIGHTS, images.transpose(0, 1)), labels)


def another_forward(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    loss = time_major(model, images, labels)
    model(dataset()[:7][0].transpose(0, 1))
    return loss


def steps(world: World, loss: Loss, workers: int = 0) -> Iterator[float]:
    """Yield the distance of each step's gradients from those of one process."""
    reference = Reshaped()
    model, optimizer = distributed.prepare((m := Reshaped()), torch.optim.SGD(m.parameters(), 0))
    sampler = distributed.sampler(dataset(), BATCH, seed=2)
    loader = DataLoader(dataset(), batch_sampler=sampler, num_workers=workers)
    for number, (share, whole) in enumerate(zip(loader, global_batches(1, 2), strict=True), 1):
        for one, batch in ((model, share), (reference, whole)):
            one.zero_grad()
            loss(one, *batch).backward()
        gradients = [{n: v.grad for n, v in one.named_parameters()} for one in (model, reference)]
        yield distance(*gradients)
        optimizer.step()
        assert sampler.position == min(number * BATCH, COUNT)
    assert sampler.epoch == 1


@pytest.mark.proves(
    "Own loops weight a batch by what its loader or sampler gave, and stop if weights or "
    "learning rates of ranks differ."
)
@pytest.mark.parametrize("loss", [time_major, weights_first, another_forward])
def test_a_sampler_counts_whatever_the_model_is_called_with(world: World, loss: Loss) -> None:
    assert max(steps(world, loss)) <= BOUND


def test_workers_that_read_ahead_change_no_count(world: World) -> None:
    assert max(steps(world, time_major, workers=1)) <= BOUND


@pytest.mark.several_ranks
def test_the_comparison_finds_counts_of_the_first_tensor(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reading, "use", lambda self: None)
    error = max(next(steps(world, loss)) for loss in (time_major, weights_first))
    if BATCH % world.size:
        assert error > 1e-3


def loop_over(batches: Any, model: Any, optimizer: Any) -> None:
    for images, labels in batches:
        optimizer.zero_grad()
        cross_entropy(model, images, labels).backward()
        optimizer.step()


def ahead(batches: Any) -> Iterator[Any]:
    """Yield batches as a prefetcher does: the next one is read before."""
    iterator = iter(batches)
    kept = [next(iterator)]
    for batch in iterator:
        kept.append(batch)
        yield kept.pop(0)
    yield from kept


@pytest.mark.parametrize("reader", [list, ahead])
def test_batches_that_are_read_ahead_are_refused(
    world: World, reader: Callable[[Any], Any]
) -> None:
    """The loop does not train on the batch that was read last."""
    pair = distributed.prepare((m := Net()), torch.optim.SGD(m.parameters(), 0.1))
    loader = DataLoader(dataset(), batch_sampler=distributed.sampler(dataset(), BATCH))
    with pytest.raises(UsageError, match="batches were read before the first backward"):
        loop_over(reader(loader), *pair)


def test_a_look_at_a_batch_leaves_the_loop_alone(world: World) -> None:
    pair = distributed.prepare((m := Net()), torch.optim.SGD(m.parameters(), 0.1))
    sampler = distributed.sampler(dataset(), BATCH)
    loader = DataLoader(dataset(), batch_sampler=sampler)
    kept = iter(loader)  # as tutorials look at images
    next(kept)
    for number, batch in enumerate(loader, 1):
        next(iter(loader))
        loop_over([batch], *pair)
        assert sampler.position == min(number * BATCH, COUNT)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_may_skip_the_last_batch_of_an_epoch(world: World, workers: int) -> None:
    """Later epochs once read the skipped batch alone."""
    pair = distributed.prepare((m := Net()), torch.optim.SGD(m.parameters(), 0.1))
    sampler = distributed.sampler(dataset(), BATCH)
    loader = DataLoader(dataset(), batch_sampler=sampler, num_workers=workers)
    for epoch in range(3):
        assert sampler.epoch == epoch
        for number, batch in enumerate(loader, 1):
            if number < len(loader):
                loop_over([batch], *pair)
        assert number == len(loader)


def test_one_batch_of_workers_that_read_ahead_may_be_used(world: World) -> None:
    model, optimizer = distributed.prepare((m := Net()), torch.optim.SGD(m.parameters(), 0.1))
    sampler = distributed.sampler(dataset(), BATCH)
    batch = next(iter(DataLoader(dataset(), batch_sampler=sampler, num_workers=2)))
    for _ in range(2):
        loop_over([batch], model, optimizer)
    assert sampler.position == 0


@pytest.mark.several_ranks
def test_two_sets_of_unlike_shares_are_refused(world: World) -> None:
    pair = distributed.prepare((m := Net()), torch.optim.SGD(m.parameters(), 0.1))
    loaders = [
        DataLoader(dataset(count), batch_sampler=distributed.sampler(dataset(count), size))
        for count, size in ((COUNT, BATCH), (3 * world.size, world.size))
    ]
    with pytest.raises(UsageError, match="two sets are read at once"):
        for batch, _ in zip(*loaders, strict=True):
            loop_over([batch], *pair)


def class_weighted(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
    return functional.cross_entropy(outputs, labels, WEIGHTS), WEIGHTS[labels].sum()


def ignoring(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
    return functional.cross_entropy(outputs, labels, ignore_index=1), (labels != 1).sum()


def summed(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
    return functional.cross_entropy(outputs, labels, reduction="sum") / BATCH, None


@pytest.mark.parametrize("criterion", [class_weighted, ignoring, summed])
@pytest.mark.parametrize("counted", [True, False], ids=["sampler", "forward"])
def test_a_weight_that_is_given_makes_any_loss_that_of_the_global_batch(
    world: World, criterion: Callable[..., Any], counted: bool
) -> None:
    reference = Net()
    model, optimizer = distributed.prepare((m := Net()), torch.optim.SGD(m.parameters(), 0))
    loader = DataLoader(dataset(), batch_sampler=distributed.sampler(dataset(), BATCH, seed=2))
    for share, whole in zip(loader, global_batches(1, 2), strict=True):
        if not counted:
            current().readings.clear()
            if len(whole[1]) < world.size:  # nothing then knows of placeholders
                break
        for one, (images, labels) in ((model, share), (reference, whole)):
            one.zero_grad()
            loss, weight = criterion(one(images), labels)
            if not torch.isfinite(loss):  # the labels of a placeholder may all be left out
                loss = loss * 0
            with distributed.weight(*((weight,) if weight is not None else (1, 1))):
                loss.backward()
        gradients = [{n: v.grad for n, v in one.named_parameters()} for one in (model, reference)]
        assert distance(*gradients) <= BOUND
        optimizer.step()


def test_an_evaluation_counts_the_samples_of_its_sampler(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels in a dict, or after the first dimension; criteria that are no mean over samples."""
    samples, model = dataset(), Net()
    images, labels = samples[:]
    outputs = model(images).detach()
    sampler = distributed.sampler(samples, 5, shuffle=False)

    def evaluated(form: Callable[[Tensor], Any], criterion: Any) -> dict[str, float]:
        loader = DataLoader(samples, batch_sampler=sampler)
        return distributed.evaluate(model, ((x, form(y)) for x, y in loader), criterion)

    wanted = float(functional.cross_entropy(outputs, labels))
    for form, get in (
        (lambda y: {"first": y, "second": y}, lambda y: y["second"]),
        (lambda y: [y, y, y], lambda y: y[0]),
        (lambda y: y.expand(3, -1), lambda y: y[0]),
    ):
        sums = evaluated(form, lambda o, y, get=get: functional.cross_entropy(o, get(y)))
        assert sums["samples"] == COUNT
        assert sums["loss"] == pytest.approx(wanted, rel=1e-9)
    assert not capsys.readouterr().err
    sums = evaluated(lambda y: y, nn.CrossEntropyLoss(WEIGHTS))
    remarks = capsys.readouterr().err
    assert ("the criterion is not a mean over samples" in remarks) == (world.rank == 0)
    sums = evaluated(lambda y: y, class_weighted)
    assert sums["loss"] == pytest.approx(float(class_weighted(outputs, labels)[0]), rel=1e-9)
    with pytest.raises(UsageError, match="labels are a dict, which does not tell the number"):
        distributed.evaluate(nn.Identity(), [({}, {"a": labels})])


@pytest.mark.several_ranks
@pytest.mark.parametrize("is_divided", [False, True])
def test_a_set_that_is_divided_already_is_remarked_on(
    world: World, capsys: pytest.CaptureFixture[str], is_divided: bool
) -> None:
    model, optimizer = distributed.prepare((m := Net()), torch.optim.SGD(m.parameters(), 0.1))
    start, step = (world.rank, world.size) if is_divided else (0, 1)
    mine = Subset(dataset(12), range(start, 12, step))
    loader = DataLoader(mine, batch_sampler=distributed.sampler(mine, world.size))
    loop_over(loader, model, optimizer)
    is_remarked = "the ranks have different samples in their data sets" in capsys.readouterr().err
    assert is_remarked == (is_divided and world.rank == 0)


assert len(WEIGHTS) == CLASSES
