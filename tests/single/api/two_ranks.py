"""A user's script on two ranks: several runs and a check of a plan, then a callback that fails."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hvdtrain import Callback, PlanConfig, TrainConfig, cut, plan_check, train
from hvdtrain.host import launchers

RANK = launchers.detect(os.environ).rank


class Fails(Callback):
    """Counts on which ranks it is called, and fails at the end of an epoch."""

    def on_epoch(self, metrics: Mapping[str, Any]) -> None:
        raise ZeroDivisionError(f"no tracker on rank {RANK}")


def network() -> nn.Module:
    torch.manual_seed(RANK)  # the ranks start with other weights: those of rank 0 count
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16**2, 8), nn.ReLU(), nn.Linear(8, 5))


def momentum(parameters: Mapping[str, nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of `--optimizer sgd`, made here."""
    return torch.optim.SGD(list(parameters.values()), lr=lr, momentum=0.9, nesterov=True)


def main(data: str, folder: Path) -> None:
    """Write the results of rank 0 to `results.json`, and then end the job."""
    losses = {}
    for plan in ("dp", "mp"):
        config = TrainConfig(
            model=cut(network()),
            data=data,
            plan=plan,
            epochs=1,
            precision="fp64",
            loss=lambda outputs, targets: cross_entropy(outputs, targets, reduction="none"),
            optimizer=momentum,
            lr=0.05,
            lr_schedule=lambda done: 1,
            augment=lambda images, seeds, epoch: images,
            run=str(folder / plan),
        )
        losses[plan] = train(config)["final"]["test_loss"]
    parity = plan_check(
        PlanConfig(model=cut(network()), ranks=2, plan="mp", image_size=16, classes=5)
    )
    if RANK == 0:
        results = {"losses": losses, "is_within": parity.is_within, "steps": parity.steps}
        (folder / "results.json").write_text(json.dumps(results))
    config = TrainConfig(model=network(), data=data, epochs=1, run=str(folder / "fails"))
    try:
        train(config, callbacks=Fails())
    except ZeroDivisionError:
        print("rank 0 cannot continue alone")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
