"""Helpers for tests under mpirun: runtimes of small models, and batches for them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from hvdtrain import models
from hvdtrain.backends.pytorch.build import build_runtime
from hvdtrain.check.plan import MEAN, STD, local_batch, random_batch
from hvdtrain.config import TrainConfig
from hvdtrain.models import resnet, vit
from hvdtrain.models.component import Component
from hvdtrain.parallel.runtime import Runtime, Step
from hvdtrain.parallel.stage import Images
from hvdtrain.plan import schedule
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.schedule import program
from hvdtrain.world import World

CLASSES = 7
Result = TypeVar("Result")


def components_of(model: str, size: int) -> list[Component]:
    """Return the components of a model, or of a small variant for tests with every plan.

    "resnet" has the blocks of resnet18, and "vit" those of vit_tiny, with fewer channels.
    """
    if model == "vit":
        return vit._vit(vit.Shape(width=24, depth=3, heads=3, hidden=48), CLASSES, size, None)
    if model != "resnet":
        return models.components(model, CLASSES, size)
    channels = [(8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2)]
    blocks = [
        Component(f"layer{layer}.0", partial(resnet.BasicBlock, *arguments))
        for layer, arguments in enumerate(channels, 1)
    ]
    head = Component("head", partial(resnet._head, 32, CLASSES))
    return [Component("stem", _stem), *blocks, head]


def _stem() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))


def names(components: Sequence[Component]) -> list[str]:
    return [part.name for part in components]


def runtime_of(
    config: TrainConfig, plan: Plan, components: Sequence[Component], size: int, world: World
) -> Runtime:
    images = Images(MEAN, STD, torch.device("cpu"), config.precision)
    return build_runtime(config, plan, components, images, size, world)


def run_step(
    runtime: Runtime, plan: Plan, world: World, size: int, batch_size: int, seed: int
) -> Step:
    """Run one training step on a random batch."""
    runtime.settings.draws.seed = seed
    pieces = cut(plan, batch_size)
    batch = random_batch(batch_size, size, CLASSES, seed)
    actions = schedule.training_step(plan, pieces)[world.rank]
    todo = program(plan, pieces, actions, world.rank)
    return runtime.run(Step(todo, *local_batch(plan, pieces, world.rank, *batch)))


def on_first(world: World, compute: Callable[[], Result]) -> Result:
    """Return on all ranks what rank 0 computes; meanwhile the others leave it their cores."""
    result: Result = world.broadcast(compute() if world.rank == 0 else None)
    return result


def whole_state(plan: Plan, runtime: Runtime, world: World) -> dict[str, np.ndarray]:
    """Return all parameters and buffers by name on all ranks; check that replicas are equal."""
    held = {
        name: tensor.detach().numpy().copy()
        for part in runtime.parts.values()
        for name, tensor in part.model.tensors().items()
    }
    whole: dict[str, np.ndarray] = {}
    for theirs in world.gather(held):
        for name, value in theirs.items():
            assert whole.setdefault(name, value).tobytes() == value.tobytes(), name
    return whole
