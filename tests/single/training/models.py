"""Models of a user who made a mistake."""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from hvdtrain.models.component import Component
from tests.single.training import moments


def ten(classes: int, image_size: int) -> list[Component]:
    """Return a model with ten logits, whatever the number of classes."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, 10))

    return [Component("all", build)]


def small(classes: int, image_size: int) -> list[Component]:
    """Return a model with a single hidden layer."""
    hidden = Component(
        "hidden", lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, 8), nn.ReLU())
    )
    return [hidden, Component("head", partial(nn.Linear, 8, classes))]


class Tells(nn.Module):
    """Changes nothing, and reports each forward."""

    def __init__(self, moments_of_rank: moments.Moments) -> None:
        super().__init__()
        self.moments = moments_of_rank

    def forward(self, images: Tensor) -> Tensor:
        if not images.is_meta:
            self.moments.pass_by("train" if self.training else "evaluate")
        return images


def with_moments(classes: int, image_size: int) -> list[Component]:
    """Return `small`; a fault is injected into it (see `moments`)."""
    return [Component("tells", partial(Tells, moments.watch_rank())), *small(classes, image_size)]


class Faulty(nn.Module):
    """A linear model that calls `fail` in the fifth training step on the ranks in FAULTY_RANKS."""

    def __init__(self, image_size: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * image_size**2, classes)
        self.calls = 0

    def fail(self) -> None:
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        self.calls += self.training and not images.is_meta
        if self.calls == 5 and os.environ["OMPI_COMM_WORLD_RANK"] in os.environ["FAULTY_RANKS"]:
            self.fail()
        logits: Tensor = self.linear(images.flatten(1))
        return logits


class Raises(Faulty):
    """Fails, and notes the time."""

    def fail(self) -> None:
        run = Path(sys.argv[sys.argv.index("--run") + 1])
        (run / "raised").write_text(str(time.time()))
        raise RuntimeError("this rank is at fault")


def raises(classes: int, image_size: int) -> list[Component]:
    return [Component("all", partial(Raises, image_size, classes))]


def is_asked_to_stop(classes: int, image_size: int) -> list[Component]:
    """Return `small`; while it is built, the ranks in ASKED_RANKS get a scheduler's signal."""
    if os.environ["OMPI_COMM_WORLD_RANK"] in os.environ["ASKED_RANKS"].split(","):
        os.kill(os.getpid(), signal.SIGTERM)
    return small(classes, image_size)


def hangs(classes: int, image_size: int) -> list[Component]:
    """Hang on the ranks in FAULTY_RANKS; return `small` on others."""
    if os.environ.get("OMPI_COMM_WORLD_RANK", "none") in os.environ["FAULTY_RANKS"].split(","):
        signal.pause()
    return small(classes, image_size)


class RaisesMuch(Faulty):
    """Fails with a message that is longer than an environment can hold."""

    def fail(self) -> None:
        raise RuntimeError("this rank is at fault " + 10_000 * "and says so at length ")


def raises_much(classes: int, image_size: int) -> list[Component]:
    return [Component("all", partial(RaisesMuch, image_size, classes))]


class IsAskedToStop(Faulty):
    """Sends a scheduler's signal to the ranks in FAULTY_RANKS, in the first evaluation."""

    def forward(self, images: Tensor) -> Tensor:
        is_evaluated = not self.training and not images.is_meta
        if is_evaluated and os.environ["OMPI_COMM_WORLD_RANK"] in os.environ["FAULTY_RANKS"]:
            os.kill(os.getpid(), signal.SIGTERM)
        logits: Tensor = self.linear(images.flatten(1))
        return logits


def is_asked_to_stop_in_evaluation(classes: int, image_size: int) -> list[Component]:
    return [Component("all", partial(IsAskedToStop, image_size, classes))]


class Drifts(Faulty):
    """Changes its own bias on a faulty rank."""

    def fail(self) -> None:
        self.linear.bias.data += 1e-3


def drifts(classes: int, image_size: int) -> list[Component]:
    return [Component("all", partial(Drifts, image_size, classes))]


class HesitatesAlone(nn.Module):
    """A linear model; the second instance on rank 0 takes four seconds for its first batch."""

    trained: ClassVar[list[int]] = []

    def __init__(self, image_size: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * image_size**2, classes)

    def forward(self, images: Tensor) -> Tensor:
        if self.training and not images.is_meta and id(self) not in self.trained:
            self.trained.append(id(self))
            if len(self.trained) == 2 and os.environ["OMPI_COMM_WORLD_RANK"] == "0":
                time.sleep(4)
        logits: Tensor = self.linear(images.flatten(1))
        return logits


def hesitates_alone(classes: int, image_size: int) -> list[Component]:
    return [Component("all", partial(HesitatesAlone, image_size, classes))]


def flattens(classes: int, image_size: int) -> list[Component]:
    """Return a model with a view that fails for an empty batch, behind a batch norm."""
    return [
        Component("norm", partial(nn.BatchNorm2d, 3)),
        Component("flat", Flattens),
        Component("head", partial(nn.Linear, 3 * image_size**2, classes)),
    ]


class Flattens(nn.Module):
    """Flattens by a view."""

    def forward(self, images: Tensor) -> Tensor:
        return images.contiguous().view(len(images), -1)


def normed(classes: int, image_size: int) -> list[Component]:
    """Return a model with batch norm over one value per sample and channel."""
    flat = Component("flat", lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, 8)))
    return [
        flat,
        Component("head", lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, classes))),
    ]


def cumulative(classes: int, image_size: int) -> list[Component]:
    """Return `normed` with a batch norm that cannot run on the meta device."""

    def head() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(8, momentum=None), nn.Linear(8, classes))

    return [normed(classes, image_size)[0], Component("head", head)]


class Follower(nn.Module):
    """Keeps a running mean of its inputs."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean()
        return inputs - self.mean


def follows(classes: int, image_size: int) -> list[Component]:
    return [Component("follower", Follower), *small(classes, image_size)]


def flattens_alone(classes: int, image_size: int) -> list[Component]:
    """Return a model with the same view, without a batch norm."""
    return flattens(classes, image_size)[1:]


class Still(nn.BatchNorm1d):
    """Stays in evaluation mode, as a frozen batch norm does."""

    def train(self, mode: bool = True) -> "Still":
        return super().train(False)


def frozen_norm(classes: int, image_size: int) -> list[Component]:
    """Return a model whose batch norm accepts one value per channel, because it is frozen."""
    flat = Component("flat", lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, 8)))
    return [flat, Component("head", lambda: nn.Sequential(Still(8), nn.Linear(8, classes)))]


def hangs_at(classes: int, image_size: int) -> list[Component]:
    """Return `small`; the ranks in FAULTY_RANKS hang at HANGS_AT, in a disk or stopped."""
    if os.environ.get("OMPI_COMM_WORLD_RANK", "none") in os.environ["FAULTY_RANKS"].split(","):
        from tests.single.training import hangs

        hangs.ARRANGE[os.environ["HANGS_AT"]]()
    return small(classes, image_size)


class Puts(nn.Module):
    """Uses an operation whose result depends on the order of threads."""

    def forward(self, input: Tensor) -> Tensor:
        return input.flatten(1).clone().put_(torch.tensor([0, 0]), input.new_ones(2))


def puts(classes: int, image_size: int) -> list[Component]:
    """Return a model with an operation that has no deterministic algorithm."""
    return [
        Component("puts", Puts),
        Component("head", partial(nn.Linear, 3 * image_size**2, classes)),
    ]
