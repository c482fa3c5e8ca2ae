"""Workers and servers for tests: they train as a session and the training loop do."""

import time
from typing import Any

import numpy as np

from hvdtrain.backends.pytorch.parts import set_learning_rate
from hvdtrain.check.plan import local_batch, random_batch
from hvdtrain.parallel.runtime import Step
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan, Stage
from hvdtrain.plan.schedule import program_of
from hvdtrain.world import World
from tests.mpi.apart import (
    EPOCH,
    SIZE,
    Trainer,
    Weights,
    config_of,
)
from tests.mpi.common import CLASSES, components_of, names

OPTIMIZERS: list[dict[str, Any]] = [
    {},
    {"optimizer": "adamw", "lr": 0.003, "weight_decay": 0.1},
]


class Served(Trainer):
    """Trains as `TorchSession` and the training loop do, where ranks may hold no stage."""

    def step(self, number: int) -> None:
        epoch, k = divmod(number, len(self.sizes))
        for part in self.runtime.parts.values():
            part.meetings.before_step(epoch)
            if part.optimizer is not None:
                set_learning_rate(part.optimizer, self.config.lr / (1 + number))
        size, rank = self.sizes[k], self.world.rank
        batch = random_batch(size, SIZE, CLASSES, number)
        images, labels = local_batch(self.plan, cut(self.plan, size), rank, *batch)
        self.runtime.settings.draws.seed = number
        self.runtime.run(Step(program_of(self.plan, size, rank, True), images, labels))
        for part in self.runtime.parts.values():
            part.meetings.after_step(k + 1)


def workers(world: World, servers: int, model: str = "cnn", last: int = 1) -> Plan:
    """Return unequal replicas on all ranks but the servers.

    Args:
        last: share of the last replica, if there are several.
    """
    count = world.size - servers
    shares = [*range(count + 1, 2, -1), last] if count > 1 else [1]
    held = tuple(names(components_of(model, SIZE)))
    return Plan((Stage(held, tuple(range(count)), tuple(shares)),), microbatches=2)


def trained(
    world: World, sync: str, servers: int, steps: int = 7, model: str = "cnn", **options: Any
) -> Weights:
    """Return the weights after some steps and a meeting; checks that all ranks agree on them."""
    plan = workers(world, servers, model, options.pop("last", 1))
    sizes = options.pop("sizes", EPOCH)
    if sync == "exact":
        config = config_of(model=model, reduce_with="mpi", **options)
    else:
        config = config_of(f"{sync},servers={servers}", model, **options)
    trainer = Served(config, plan, components_of(model, SIZE), world, sizes)
    trainer.train(0, steps)
    trainer.meet()
    return trainer.whole()


class Delayed(Served):
    """Workers that take a random time for a step."""

    def step(self, number: int) -> None:
        draw = np.random.default_rng([self.world.rank, number])
        if self.world.rank < len(self.plan.ranks):
            time.sleep(draw.uniform(0, 0.008))
        super().step(number)
