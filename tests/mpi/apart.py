"""Replicas with local steps, for tests: their training, and serial simulations of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hvdtrain.backends.pytorch.state import TorchState
from hvdtrain.check.plan import local_batch, random_batch
from hvdtrain.config import TrainConfig
from hvdtrain.models.component import Component, tensor_shapes
from hvdtrain.options.requests import DiLoCo, Elastic
from hvdtrain.parallel.runtime import Runtime, Step
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan, replicated
from hvdtrain.plan.schedule import program_of
from hvdtrain.world import World
from tests.mpi.common import CLASSES, components_of, names, run_step, runtime_of, whole_state
from tests.mpi.plans import staged

SIZE = 8
EPOCH = (13, 13, 13, 13, 2)  # a tail with fewer samples than some numbers of replicas
ALONE = World("none", 0, 1, 0, 1, 1)
BOUND = 1e-12
SEEN = 1e-7

Weights = dict[str, np.ndarray]
History = list[list[Weights]]  # per step (and per epoch, after it), per replica


def config_of(sync: str = "exact", model: str = "cnn", **options: Any) -> TrainConfig:
    chosen: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9}
    chosen |= {"weight_decay": 1e-3} | options
    config = TrainConfig(model=model, data="set", precision="fp64", sync=sync, **chosen)
    config.check()
    return config


def weights_of(runtime: Runtime) -> Weights:
    return {
        name: tensor.detach().numpy().copy()
        for part in runtime.parts.values()
        for name, tensor in part.model.tensors().items()
    }


def difference(actual: Weights, reference: Weights) -> float:
    """Return the largest difference, relative to the largest value of each tensor."""
    assert actual.keys() == reference.keys()
    return max(
        float(np.abs(actual[name] - value).max()) / max(float(np.abs(value).max()), 1e-6)
        for name, value in reference.items()
    )


@dataclass
class Trainer:
    """Trains as `TorchSession` and the training loop do."""

    config: TrainConfig
    plan: Plan
    components: list[Component]
    world: World
    sizes: Sequence[int] = EPOCH

    def __post_init__(self) -> None:
        self.runtime = runtime_of(self.config, self.plan, self.components, SIZE, self.world)
        self.runtime.observer.close()
        self.state = TorchState(
            plan=self.plan,
            shapes=tensor_shapes(self.components),
            runtime=self.runtime,
            config=self.config,
            world=self.world,
        )

    @property
    def meetings(self) -> list[Any]:
        return [part.meetings for part in self.runtime.parts.values()]

    def step(self, number: int) -> None:
        """Run one step; `number` counts from 0 over all epochs."""
        epoch, k = divmod(number, len(self.sizes))
        for meeting in self.meetings:
            meeting.before_step(epoch)
        run_step(self.runtime, self.plan, self.world, SIZE, self.sizes[k], number)
        for meeting in self.meetings:
            meeting.after_step(k + 1)

    def meet(self) -> None:
        for meeting in self.meetings:
            meeting.meet()
        assert not any(meeting.differ for meeting in self.meetings)

    def train(self, start: int, stop: int) -> list[Weights]:
        """Run steps, with a meeting after each epoch; return the weights after each of both."""
        history = []
        for number in range(start, stop):
            self.step(number)
            history.append(weights_of(self.runtime))
            if (number + 1) % len(self.sizes) == 0:
                self.meet()
                history.append(weights_of(self.runtime))
        return history

    def whole(self) -> Weights:
        """Return the weights of all stages; fails if replicas differ."""
        return whole_state(self.plan, self.runtime, self.world)

    def counted(self, name: str) -> float:
        return sum(
            counts.counted().get(name, 0.0)
            for part in self.runtime.parts.values()
            for counts in (part.gradients, part.meetings)
        )

    def share(self) -> Weights:
        """Return the tensors that all ranks together write to a checkpoint."""
        local = {name: value.copy() for name, value in self.state.share().items()}
        everywhere = self.world.gather(local)
        whole = {name: value for rank_share in everywhere for name, value in rank_share.items()}
        assert len(whole) == sum(map(len, everywhere)), "two ranks wrote the same tensor"
        return whole

    def restore(self, arrays: Weights) -> None:
        shapes = {name: value.shape for name, value in arrays.items()}
        expected = self.state.expected(True, shapes)
        assert all(shapes[name] == shape for name, shape in expected.items())
        self.state.put({name: arrays[name].copy() for name in expected})


def unequal(ranks: int) -> Plan:
    """Return replicas with unequal shares; the last of three or more gets few samples or none."""
    components = names(components_of("cnn", SIZE))
    shares = [[1], [3, 1], [4, 2, 1], [4, 3, 2, 1]][ranks - 1]
    return staged((list(range(ranks)), shares), microbatches=2)(components)


def stages(world: World, model: str = "cnn") -> Plan:
    """Return a pipeline with at least one replicated stage, if there are ranks for it."""
    components = names(components_of(model, SIZE))
    maker = {
        1: staged(([0], [1]), ([0], [1]), microbatches=2),
        2: staged(([0, 1], [1, 2]), ([1], [1]), microbatches=2),
        3: staged(([0], [1]), ([1, 2], [2, 1]), microbatches=2, schedule="zb-h1"),
        4: staged(([0, 1], [2, 1]), ([2, 3], [1, 2]), microbatches=2, schedule="zb-h1"),
    }[world.size]
    return maker(components)


def final(
    config: TrainConfig, plan: Plan, world: World, steps: int = 7, **options: Any
) -> Weights:
    trainer = Trainer(config, plan, components_of(config.model, SIZE), world, **options)
    trainer.train(0, steps)
    trainer.meet()
    return trainer.whole()


class Replicas:
    """A serial simulation of replicas with local steps: each is a runtime of one rank."""

    def __init__(self, config: TrainConfig, plan: Plan, components: list[Component]) -> None:
        self.config, self.plan, self.count = config, plan, len(plan.stages[0].ranks)
        self.alone = replicated(names(components), 1, 1, None)
        exact = replace(config, sync="exact")
        self.runtimes = [
            runtime_of(exact, self.alone, components, SIZE, ALONE) for _ in range(self.count)
        ]
        for runtime in self.runtimes:
            runtime.observer.close()
        self.parameters = [runtime.parts[0].model.parameters() for runtime in self.runtimes]
        self.names = list(self.parameters[0])
        self.samples = np.zeros(self.count)

    def step(self, number: int, size: int) -> None:
        """Let each replica make a step on its own samples."""
        pieces, batch = cut(self.plan, size), random_batch(size, SIZE, CLASSES, number)
        for rank, runtime in enumerate(self.runtimes):
            images, labels = local_batch(self.plan, pieces, rank, *batch)
            if len(labels):
                todo = program_of(self.alone, len(labels), 0, True)
                runtime.run(Step(todo, images, labels))
            self.samples[rank] += len(labels)

    def value(self, rank: int, name: str) -> np.ndarray:
        """Return a parameter of a replica; writing to it changes it."""
        array: np.ndarray = self.parameters[rank][name].detach().numpy()
        return array

    def average(self, name: str, weights: np.ndarray) -> np.ndarray:
        values = [self.value(rank, name) for rank in range(self.count)]
        return np.average(values, axis=0, weights=weights)

    def put(self, name: str, value: np.ndarray) -> None:
        for rank in range(self.count):
            self.value(rank, name)[...] = value

    def weights(self) -> list[Weights]:
        return [
            {name: self.value(rank, name).copy() for name in self.names}
            for rank in range(self.count)
        ]


def simulated_local(replicas: Replicas, period: int, steps: int) -> History:
    history = []

    def meet() -> None:
        for name in replicas.names if replicas.samples.any() else ():
            replicas.put(name, replicas.average(name, replicas.samples))
        replicas.samples[:] = 0

    for number in range(steps):
        k = number % len(EPOCH) + 1
        replicas.step(number, EPOCH[k - 1])
        if k % period == 0:
            meet()
        history.append(replicas.weights())
        if k == len(EPOCH):
            meet()
            history.append(replicas.weights())
    return history


def simulated_elastic(replicas: Replicas, period: int, steps: int) -> History:
    request = replicas.config.sync_request
    assert isinstance(request, Elastic)
    rate = request.rate or 0.9 / replicas.count
    centre = replicas.weights()[0]
    history, since = [], 0
    ranks = range(replicas.count)

    def pull() -> None:
        for name in replicas.names:
            apart = [replicas.value(rank, name) - centre[name] for rank in ranks]
            for rank in ranks:
                replicas.value(rank, name)[...] -= rate * apart[rank]
            centre[name] = centre[name] + rate * np.sum(apart, axis=0)

    for number in range(steps):
        k = number % len(EPOCH) + 1
        replicas.step(number, EPOCH[k - 1])
        since += 1
        if k % period == 0:
            pull()
            since = 0
        history.append(replicas.weights())
        if k == len(EPOCH):
            if since:
                pull()
                since = 0
            history.append([{name: centre[name].copy() for name in centre} for _ in ranks])
    return history


def simulated_diloco(replicas: Replicas, period: int, steps: int) -> History:
    """Return the history with torch's own optimizer for the outer steps."""
    config = replicas.config
    start = {name: torch.tensor(replicas.value(0, name).copy()) for name in replicas.names}
    request = config.sync_request
    assert isinstance(request, DiLoCo)
    outer = torch.optim.SGD(
        list(start.values()),
        request.lr,
        request.momentum,
        nesterov=request.momentum > 0,
    )
    history = []

    def meet() -> None:
        if not replicas.samples.any():
            return
        for name, value in start.items():
            average = replicas.average(name, replicas.samples)
            value.grad = value - torch.from_numpy(average)
        outer.step()
        for name, value in start.items():
            replicas.put(name, value.numpy())
        replicas.samples[:] = 0

    for number in range(steps):
        k = number % len(EPOCH) + 1
        replicas.step(number, EPOCH[k - 1])
        if k % period == 0:
            meet()
        history.append(replicas.weights())
        if k == len(EPOCH):
            meet()
            history.append(replicas.weights())
    return history


# By name: the simulation, the value of --sync, and other options.
METHODS: dict[str, tuple[Callable[[Replicas, int, int], History], str, dict[str, Any]]] = {
    "local": (simulated_local, "local:2", {}),
    "local, adam": (simulated_local, "local:3", {"optimizer": "adam", "lr": 0.003}),
    "elastic": (simulated_elastic, "elastic:2", {}),
    "elastic, rate 0.3": (simulated_elastic, "elastic:5,rate=0.3", {}),
    "diloco": (simulated_diloco, "diloco:2", {}),
    "diloco, adamw": (simulated_diloco, "diloco:3", {"optimizer": "adamw", "lr": 0.003}),
}
