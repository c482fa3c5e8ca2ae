"""What the tests under mpirun share: runtimes of small models, and batches for them."""

from collections.abc import Sequence

import numpy as np
import torch

from hvdtrain.config import TrainConfig
from hvdtrain.models.component import Component
from hvdtrain.parallel import schedule
from hvdtrain.parallel.cut import cut
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.program import program
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.parallel.stage import Images
from hvdtrain.parallel.step import Step
from hvdtrain.training.build import build_runtime
from hvdtrain.training.plancheck import MEAN, STD, my_step, random_batch
from hvdtrain.world import World

CLASSES = 7
SIZES = {"cnn": 16, "vit_tiny": 8, "resnet18": 8}


def names(components: Sequence[Component]) -> list[str]:
    return [part.name for part in components]


def runtime_of(
    config: TrainConfig, plan: Plan, components: Sequence[Component], size: int, here: World
) -> Runtime:
    images = Images(MEAN, STD, torch.device("cpu"), config.precision)
    return build_runtime(config, plan, components, images, size, here)


def run_step(
    runtime: Runtime, plan: Plan, here: World, size: int, batch_size: int, seed: int
) -> Step:
    """One training step on a random batch."""
    pieces = cut(plan, batch_size)
    batch = random_batch(batch_size, size, CLASSES, seed)
    step = my_step(plan, pieces, here.rank, *batch)
    actions = schedule.training_step(plan, pieces)[here.rank]
    return runtime.run(program(plan, pieces, actions, here.rank), step)


def whole_state(plan: Plan, runtime: Runtime, here: World) -> dict[str, np.ndarray]:
    """All parameters and buffers by name, on all ranks; replicas must hold the same bits."""
    own = {
        name: tensor.detach().numpy().copy()
        for part in runtime.parts.values()
        for name, tensor in part.model.tensors().items()
    }
    whole: dict[str, np.ndarray] = {}
    for theirs in here.gather(own):
        for name, value in theirs.items():
            assert whole.setdefault(name, value).tobytes() == value.tobytes(), name
    return whole
