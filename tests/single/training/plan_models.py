"""Models for tests of plans: one that hangs, one that differs from run to run."""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from hvdtrain.models import components
from hvdtrain.models.component import Component


class _Hang(nn.Module):
    """Writes the file $HANG_AFTER in its fifth forward, then hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, activations: Tensor) -> Tensor:
        self.forwards += activations.device.type != "meta" and self.training
        if self.forwards == 5:
            Path(os.environ["HANG_AFTER"]).write_text(f"{time.time()}")
            while True:
                time.sleep(1)
        return activations


def hangs(classes: int, image_size: int) -> list[Component]:
    """Return the CNN with a component near its end that hangs in training."""
    parts = components("cnn", classes, image_size)
    return [*parts[:3], Component("hang", _Hang), parts[3]]


class _Noise(nn.Module):
    def forward(self, activations: Tensor) -> Tensor:
        if activations.device.type == "meta":
            return activations
        generator = torch.Generator().manual_seed(time.perf_counter_ns())
        return activations * torch.rand(activations.shape, generator=generator).to(activations)


def noisy(classes: int, image_size: int) -> list[Component]:
    """Return the CNN with noise that differs from run to run."""
    parts = components("cnn", classes, image_size)
    return [*parts[:3], Component("noise", _Noise), parts[3]]
