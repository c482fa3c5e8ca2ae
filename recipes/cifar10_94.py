"""The optimizer and the rate of cifar10-94.yaml, after Jordan, arXiv 2404.00498."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

MOMENTUM = 0.85
DECAY = 0.0089  # per step and rate
NORM_FACTOR = 64  # of the rate, for shifts of batch norm
EVERY, SLOW_SHARE = 5, 0.77  # steps between two meetings with slow weights; their share at the end

EPOCHS, WARMUP_EPOCHS = 14, 3.2
STEP = 1024 / (EPOCHS * 50_000)  # share of the run
START, END = 0.2, 0.07  # factors of the rate


class Optimizer(torch.optim.SGD):
    """SGD with Nesterov momentum, weight decay apart from it, and lookahead.

    After every EVERY steps, and after the last one, weights and slow weights become the same mean
    (Zhang et al., arXiv 1907.08610). The slow weights' share in it grows with the cube of the
    progress.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights."""
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 1 - group["lr"] * group["decay"])
        super().step()
        for group in self.param_groups:
            before, after = group["progress"]
            for value in group["params"]:
                state = self.state[value]
                if "slow" not in state:
                    state |= {"slow": value.detach().clone(), "steps": 0}
                state["steps"] += 1
                if state["steps"] > 1 and (state["steps"] % EVERY == 0 or after >= 1):
                    value.copy_(state["slow"].lerp_(value, 1 - SLOW_SHARE * before**3))


def optimizer(parameters: Mapping[str, nn.Parameter], lr: float) -> Optimizer:
    """Return the optimizer; shifts of batch norm have a rate of their own, and no decay."""
    norms = [value for name, value in parameters.items() if ".norm" in name]
    others = [value for name, value in parameters.items() if ".norm" not in name]
    groups = (
        {"params": others, "lr": lr, "decay": DECAY},
        {"params": norms, "lr": lr * NORM_FACTOR, "decay": 0.0},
    )
    filled = [group for group in groups if group["params"]]  # a stage may have one kind alone
    return Optimizer(filled, lr, MOMENTUM, nesterov=True, fused=True)


def rate(done: float) -> float:
    """Return the factor of the rate: up from START to 1, then down to END."""
    warmup = WARMUP_EPOCHS / EPOCHS
    if done < warmup:
        return START + (1 - START) * min(1.0, (done + STEP) / warmup)
    return 1 - (1 - END) * (done - warmup) / (1 - warmup)
