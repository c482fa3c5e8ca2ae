"""The recipe of 94 % without one of its ingredients, for a test."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hvdtrain import Component

sys.path.insert(0, str(Path(__file__).parents[3] / "recipes"))
import cifar10_94

other_moves = cifar10_94.Moves(4)


def without_whitening(classes: int) -> list[Component]:
    """Return the network; its first convolution keeps its random weights."""
    return [replace(part, start=None) for part in cifar10_94.network(classes)]


class Plain(cifar10_94.Optimizer):
    """The optimizer without slow weights."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update the weights."""
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 1 - group["lr"] * group["decay"])
        torch.optim.SGD.step(self)


def without_lookahead(parameters: Mapping[str, nn.Parameter], lr: float) -> Plain:
    """Return the optimizer of all parameters."""
    made = cifar10_94.optimizer(parameters, lr)
    made.__class__ = Plain
    return made  # type: ignore[return-value]
