"""Ranks of a user's own loop stay equal: settings, weights, losses of closures, statistics."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from hvdtrain import torch as distributed
from hvdtrain.errors import CheckFailed, UsageError
from hvdtrain.torch import gradients
from hvdtrain.torch.start import current
from hvdtrain.world import World
from tests.mpi.loops import (
    BATCH,
    BOUND,
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


@pytest.mark.several_ranks
def test_learning_rates_that_differ_are_refused_in_the_next_backward(world: World) -> None:
    """A scheduler that steps by a rank's own loss; nothing else differs yet."""
    model, optimizer = distributed.prepare((m := Net()), torch.optim.SGD(m.parameters(), 0.1))
    plan = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    images, labels = dataset()[:2]
    wanted = "rank 1 has another optimizer than rank 0: lr of group 0 of optimizer 0 is 0.05 there"
    with pytest.raises(UsageError, match=f"{wanted} and 0.1 on rank 0: give schedulers numbers"):
        for step in range(3):
            optimizer.zero_grad()
            cross_entropy(model, images, labels).backward()
            optimizer.step()
            plan.step(float(step if world.rank == 1 else -step))
    assert step == 2
    distributed.stop()
    distributed.start(device="cpu")


def evaluated(model: nn.Module, folder: Path) -> None:
    distributed.evaluate(model, [dataset()[:2]])


def saved(model: nn.Module, folder: Path) -> None:
    distributed.save(folder)


def ended(model: nn.Module, folder: Path) -> None:
    state = current()
    state.check_weights("at the end of the program", dict(state.module.named_parameters()))


@pytest.mark.several_ranks
@pytest.mark.parametrize("call", [evaluated, saved, ended])
def test_weights_that_differ_are_refused(
    world: World, tmp_path: Path, call: Callable[..., None]
) -> None:
    folder = world.broadcast(tmp_path)
    model, optimizer = distributed.prepare((m := Net()), torch.optim.SGD(m.parameters(), 0.1))
    (watched,) = current().models[-1:]
    cross_entropy(model, *dataset()[:2]).backward()
    optimizer.step()
    assert [watched.is_as_stepped] == [True]
    call(model, folder)
    with torch.no_grad():
        model.head.bias[0] += 1e-9 * world.rank
    assert not watched.is_as_stepped  # so that one rank may export other weights at the end
    with pytest.raises(
        CheckFailed, match=r"rank 1 and rank 0 hold different values of head\.bias"
    ):
        call(model, folder)
    assert len(list(folder.iterdir())) == (call is saved)
    distributed.stop()
    distributed.start(device="cpu")


class Polyak(torch.optim.Optimizer):
    """The length of its steps depends on the loss that the closure returns."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss: Tensor = closure()
        used = [value for value in self.param_groups[0]["params"] if value.grad is not None]
        with torch.no_grad():
            for value in used:
                value -= 0.05 * float(loss) * value.grad
        return loss


def searching(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, 0.3, max_iter=4, line_search_fn="strong_wolfe")


def minimised(model: nn.Module, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    for images, labels in batches:

        def closure(images: Tensor = images, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model, images, labels)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
    return losses


@pytest.mark.parametrize("made", [searching, Polyak])
def test_a_closure_returns_the_loss_of_the_global_batch(
    world: World, made: Callable[..., Any]
) -> None:
    reference, model = Net(), Net()
    with distributed.alone():
        wanted = minimised(reference, made(reference.parameters()), global_batches(2, 4))
    model, optimizer = distributed.prepare(model, made(model.parameters()))
    loader = DataLoader(dataset(), batch_sampler=distributed.sampler(dataset(), BATCH, seed=4))
    result = minimised(model, optimizer, loader) + minimised(model, optimizer, loader)
    assert result == pytest.approx(wanted, rel=1e-9)
    weights = [dict(one.named_parameters()) for one in (model, reference)]
    assert distance(*weights) <= 1e3 * BOUND  # a line search repeats rounding


def test_an_optimizer_may_evaluate_its_closure_many_times(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "MOST_IDLE", 5)
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), 1e-3, max_iter=9, tolerance_change=0)
    minimised(*distributed.prepare(model, optimizer), [dataset()[:2]])


class Half(nn.Module):
    """Weights in fp16, or all in fp16, with a batch norm."""

    def __init__(self, norm: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(108, 8).half()
        self.norm = nn.BatchNorm1d(8).to(norm)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1).half())
        result: Tensor = self.norm(hidden.to(self.norm.weight.dtype))
        return result


@pytest.mark.parametrize("norm", [torch.float16, torch.float32])
def test_statistics_travel_in_their_own_precision(world: World, norm: torch.dtype) -> None:
    model, optimizer = distributed.prepare(
        (m := Half(norm)), torch.optim.SGD(m.parameters(), 0.01)
    )
    tracked: Any = model.norm.num_batches_tracked
    mean: Any = model.norm.running_mean
    tracked.fill_(2048)
    mean.fill_(1234.567)
    images, labels = dataset()[:4]
    for _ in range(2):
        optimizer.zero_grad()
        functional.cross_entropy(model(images).float(), labels).backward()
        optimizer.step()
    assert int(tracked) == 2050
    if norm == torch.float32:
        assert torch.allclose(mean, torch.tensor(1234.567 * 0.81), atol=1.0)
        assert not torch.equal(mean, mean.half().float())
