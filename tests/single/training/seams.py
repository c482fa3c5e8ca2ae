"""A user's own functions for the options that take them, for tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain import Callback


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, written anew; it counts its steps in a number, and reads the progress."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update the weights."""
        for group in self.param_groups:
            before, after = group["progress"]
            assert 0 <= before < after <= 1
            for value in group["params"]:
                state = self.state[value]
                if "velocity" not in state:
                    state |= {"velocity": torch.zeros_like(value), "steps": 0}
                state["steps"] += 1
                state["velocity"].mul_(0.9).add_(value.grad)
                value.sub_(value.grad.add(state["velocity"], alpha=0.9), alpha=group["lr"])


def momentum(parameters: Mapping[str, torch.nn.Parameter], lr: float) -> Momentum:
    """Return the optimizer of all parameters: that of `--optimizer sgd`."""
    return Momentum(list(parameters.values()), lr)


def two_rates(parameters: Mapping[str, torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Return AdamW with a tenth of the rate for biases."""
    biases = [value for name, value in parameters.items() if name.endswith("bias")]
    others = [value for name, value in parameters.items() if not name.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": biases, "lr": lr / 10}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr)


def no_optimizer(parameters: object, lr: float) -> object:
    """Return something else."""
    return parameters


def half_of_it(parameters: Mapping[str, torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Return an optimizer of one of the parameters."""
    return torch.optim.SGD(list(parameters.values())[:1], lr=lr)


class Forgetful(Momentum):
    """Keeps what a checkpoint cannot hold."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Keep a list."""
        super().step()
        for group in self.param_groups:
            for value in group["params"]:
                self.state[value]["history"] = []


def forgetful(parameters: Mapping[str, torch.nn.Parameter], lr: float) -> Forgetful:
    """Return an optimizer with a list in its state."""
    return Forgetful(list(parameters.values()), lr)


def halving(done: float) -> float:
    """Return the factor of a rate that halves in the course of the run."""
    return float(1 - done / 2)


def negative(done: float) -> float:
    """Return no rate."""
    return -done


def brighter(
    images: NDArray[np.uint8], seeds: NDArray[np.uint64], epoch: int
) -> NDArray[np.uint8]:
    """Return images of random brightness."""
    parts = np.array([np.random.default_rng([int(seed), epoch]).random() for seed in seeds])
    made: NDArray[np.uint8] = (images * (0.5 + parts / 2)[:, None, None, None]).astype(np.uint8)
    return made


def as_floats(images: NDArray[np.uint8], seeds: object, epoch: int) -> NDArray[np.float32]:
    """Return images of another type."""
    return images.astype(np.float32)


class Notes(Callback):
    """Writes what it receives into the run folder."""

    def on_start(self, config: Mapping[str, Any], run: Path) -> None:
        self.file = run / "notes.txt"
        self.note("start")

    def on_resume(self, step: int) -> None:
        self.note(f"resume {step}")

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.note(f"end {summary['steps']}")

    def note(self, text: str) -> None:
        """Append a line."""
        with self.file.open("a") as lines:
            lines.write(f"{text}\n")


class Seen:
    """Leaves images as they are, and has views of them.

    Attributes:
        views: pairs of a weight and a function.
    """

    def __init__(self, views: Any) -> None:
        self.views = views

    def __call__(
        self, images: NDArray[np.uint8], seeds: NDArray[np.uint64], epoch: int
    ) -> NDArray[np.uint8]:
        """Return the images."""
        return images


no_views = Seen(3)
no_functions = Seen([(0.5, 3)])
small_views = Seen([(1.0, lambda images: images[:, :4])])
two_views = Seen([(0.5, np.copy), (0.5, np.copy)])
