"""The scale of the loss in fp16 follows the rule of PyTorch's own."""

import random

import pytest
import torch

from hvdtrain.engine import progress
from hvdtrain.engine.progress import LOSS_SCALE, Progress


@pytest.mark.parametrize("seed", range(5))
def test_the_scale_is_that_of_torch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "GROWTH_STEPS", 3)
    chances = random.Random(seed)
    scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    mine = Progress("hash", loss_scale=LOSS_SCALE)
    for _ in range(60):
        overflows = chances.random() < 0.3
        scaler.scale(weight.sum() * (torch.inf if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mine.scale_loss(overflows)
        assert mine.loss_scale == scaler.get_scale()


def test_it_stays_between_its_bounds() -> None:
    mine = Progress("hash", loss_scale=2.0)
    for _ in range(3):
        mine.scale_loss(overflowed=True)
    assert mine.loss_scale == 1
    for _ in range(100 * progress.GROWTH_STEPS):
        mine.scale_loss(overflowed=False)
    assert mine.loss_scale == progress.LARGEST_SCALE


def test_checkpoints_of_before_have_no_scale() -> None:
    kept = {**vars(Progress("hash")), "metrics_bytes": 1}
    del kept["loss_scale"], kept["scaled_steps"]
    assert Progress.of(kept).loss_scale == 1
