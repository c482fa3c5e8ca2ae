"""Buckets of random gradients for tests of compressed sums, with one replica per rank."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain import world as worlds
from hvdtrain.options.requests import parse_compress_request
from hvdtrain.plan.cut import Share
from hvdtrain.sync.collectives import Alone, Collectives, HorovodCollectives
from hvdtrain.sync.compress import make_sums
from hvdtrain.sync.gradients import ReplicatedGradients, Sums
from hvdtrain.sync.states import States
from hvdtrain.world import World

BUCKET_BYTES = 4000
METHODS = ("fp16", "bf16", "int8", "topk:0.1", "powersgd:2")
Change = Callable[[dict[str, Tensor], int], object]  # of a replica's gradients in a step


def starting(method: str, after: int) -> str:
    """Return a value of `--compress` that leaves the first sums exact."""
    return method if method == "none" else f"{method},after={after}"


class Layers(nn.Module):
    """Weights of odd shapes in several memory orders, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(5)
        self.wide = nn.Linear(37, 13)
        self.transposed = nn.Parameter(torch.zeros(9, 17).t())
        self.single = nn.Parameter(torch.zeros(()))
        self.row = nn.Parameter(torch.zeros(1, 23))
        self.double()


class Replica:
    """This rank's replica of `Layers`, whose gradients are random numbers.

    Attributes:
        gradients: those under test.
        named: parameters by name.
        statistics: of the batch norm by name.
    """

    def __init__(
        self,
        world: World,
        method: str,
        after: int = 0,
        sums: Callable[[Collectives], Sums] | None = None,
    ) -> None:
        self.world, model = world, Layers()
        self.named = dict(model.named_parameters())
        self.statistics = {f"norm.{name}": value for name, value in model.norm.named_buffers()}
        self.collectives = collectives_of(world)
        request = parse_compress_request(starting(method, after))
        self.sums = sums(self.collectives) if sums else make_sums(request, self.collectives)
        self.gradients = ReplicatedGradients(
            self.named,
            self.statistics,
            States(dict, lambda _: None),
            self.collectives,
            self.sums,
            BUCKET_BYTES,
        )

    def step(self, number: int, change: Change = lambda *_: None, accepts: bool = True) -> None:
        """Sum random gradients; in turn, one of several replicas has no samples."""
        share = self.fill(number)
        change({name: grad_of(value) for name, value in self.named.items()}, number)
        self.gradients.start(share)
        self.gradients.finish()
        if accepts:
            self.gradients.after_update()

    def fill(self, number: int) -> Share:
        """Draw the gradients of this replica, weighted by its unequal share; return the share."""
        rank, size = self.world.rank, self.world.size
        weights = np.array([2.0 + place for place in range(size)])
        weights[number % size] *= size == 1
        weight = float(weights[rank] / weights.sum())
        draw = np.random.default_rng([number, rank])
        for parameter in self.named.values():
            noise = torch.as_tensor(draw.standard_normal(tuple(parameter.shape)))
            grad_of(parameter).copy_(noise * weight)
        for value in self.statistics.values():
            value.fill_(1 + number + (rank if value.is_floating_point() else 0))
        return Share(weight, rank == 0)

    def results(self) -> dict[str, np.ndarray]:
        """Return copies of the gradients and statistics by name."""
        grads = {name: grad_of(value) for name, value in self.named.items()}
        return {name: value.numpy().copy() for name, value in {**grads, **self.statistics}.items()}

    def residuals(self) -> dict[str, np.ndarray]:
        """Return copies of this replica's residuals by parameter name."""
        prefix = f"residual/{self.collectives.place}/"
        return {
            name.removeprefix(prefix): value.numpy().copy()
            for name, value in self.gradients.saved().items()
            if name.startswith(prefix)
        }


def collectives_of(world: World) -> Collectives:
    """Return the collective operations among all ranks."""
    if world.size == 1:
        return Alone()
    everybody = tuple(range(world.size))
    return HorovodCollectives(
        worlds.horovod(), worlds.process_set(everybody), everybody, world.rank, "test"
    )


def grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def total(world: World, named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the sum of all ranks' arrays by name."""
    everywhere = world.gather(named)
    return {name: sum((theirs[name] for theirs in everywhere), np.zeros(())) for name in named}


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two sets of arrays, relative to the largest value."""
    assert one.keys() == other.keys()
    scale = max(1e-300, *(float(np.abs(value).max()) for value in other.values()))
    return max(float(np.abs(one[name] - other[name]).max()) for name in other) / scale


def assert_equal_everywhere(world: World, named: dict[str, np.ndarray]) -> None:
    """Check that all ranks hold the same bits."""
    for theirs in world.gather(named):
        for name, value in named.items():
            assert theirs[name].tobytes() == value.tobytes(), name
