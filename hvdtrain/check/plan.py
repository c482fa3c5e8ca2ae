"""Comparison of steps under a plan with serial steps.

Each serial step starts with the current weights of the ranks, so that rounding errors do not add
up. Its optimizer gets the gradients of the ranks: gradients and updates are compared separately.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hvdtrain.backends.pytorch.batches import check_sizes, input_boundaries
from hvdtrain.backends.pytorch.build import build_runtime
from hvdtrain.backends.pytorch.optimizers import set_learning_rate
from hvdtrain.backends.pytorch.ready import agree_on_values
from hvdtrain.backends.pytorch.state import agree_on_weights, gather_tensors
from hvdtrain.check.mixing import SAMPLES, find_mixing
from hvdtrain.check.parity import Batch, Done, Parity, SerialRun, loss_scale
from hvdtrain.config import TrainConfig
from hvdtrain.engine.feed import step_seed, take_rows
from hvdtrain.errors import UsageError
from hvdtrain.models.component import Component
from hvdtrain.parallel.checksums import digest
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.parallel.stage import Images, Part
from hvdtrain.parallel.step import Step
from hvdtrain.plan.cut import Cut, cut
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.program import program_of
from hvdtrain.world import World

MEAN, STD = [0.5] * 3, [0.25] * 3
GRADIENTS_TAG = 2
CPU = torch.device("cpu")


def check_plan(
    config: TrainConfig,
    components: Sequence[Component],
    plan: Plan,
    image_size: int,
    classes: int,
    world: World,
    sizes: Sequence[int] | None = None,
    device: torch.device = CPU,
) -> Parity:
    """Compare steps under a plan with serial steps on rank 0 from the same weights. Collective.

    Both get the same batches of random images, from the seed of the configuration.

    Args:
        sizes: batch sizes; by default a whole batch, one of about two thirds (in place of the
            last one of an epoch) if the model can take it, and another whole one.
        device: of this rank. Both steps compute on it.
    """
    agree_on_values(components, world)
    images, size = Images(MEAN, STD, device, config.precision), config.batch_size
    batches = []
    for number, count in enumerate(sizes or _sizes(config, components, plan, image_size, classes)):
        whole = random_batch(count, image_size, classes, config.seed + number)
        local = local_batch(plan, cut(plan, count), world.rank, *whole)
        batches.append(Batch(count, number * size, local, whole, config.learning_rate()))
    return compare(config, components, plan, batches, images, world)


def _sizes(
    config: TrainConfig,
    components: Sequence[Component],
    plan: Plan,
    image_size: int,
    classes: int,
) -> tuple[int, ...]:
    size = config.batch_size
    tail = -(-2 * size // 3)
    try:
        inputs = input_boundaries(components, config, image_size, classes)
        check_sizes(config, plan, components, inputs, [tail])
    except UsageError:
        return size, size
    return size, tail, size


def compare(
    config: TrainConfig,
    components: Sequence[Component],
    plan: Plan,
    batches: Sequence[Batch],
    images: Images,
    world: World,
) -> Parity:
    """Compare steps under a plan on these batches with serial steps. Collective.

    It leaves no runtime behind, and restores the random generators.
    """
    config = replace(config, trace=None)
    if config.gradient_limit is not None:  # keeps the code path of the limit, but no step is bad
        config = replace(config, gradient_limit=sys.float_info.max)
    image_size = batches[0].local[0].shape[1]
    with torch.random.fork_rng():
        runtime = build_runtime(config, plan, components, images, image_size, world)
        ranks = _Ranks(runtime, plan, world, config)
        serial = SerialRun(config, components, plan, images) if world.rank == 0 else None
        try:
            before = ranks.tensors()
            if serial is not None:
                serial.compare_initial(before)
            for batch in batches:
                done = ranks.step(batch)
                if serial is not None:
                    serial.compare(batch, done, before)
                world.barrier()  # the watchdog would count a wait within a step, but not this
                before = done.tensors
        finally:
            runtime.observer.close()
        if serial is not None and _divides_batches(plan):
            assert batches[0].whole is not None
            trial = images(batches[0].whole[0][:SAMPLES])
            mixing = find_mixing(components, trial, config.seed)
            serial.parity.mixing, serial.parity.unproved = mixing.module, mixing.unproved
    parity: Parity = world.broadcast(serial.parity if serial is not None else None)
    return parity


def _divides_batches(plan: Plan) -> bool:
    return plan.microbatches > 1 or any(len(stage.ranks) > 1 for stage in plan.stages)


class _Ranks:
    """The runtime under test on all ranks. All methods are collective."""

    def __init__(self, runtime: Runtime, plan: Plan, world: World, config: TrainConfig) -> None:
        self.runtime, self.plan, self.world, self.config = runtime, plan, world, config
        self.optimizer_gradients: dict[str, Tensor] = {}
        parts = runtime.parts
        digests = {
            name: value for part in parts.values() for name, value in part.model.digests().items()
        }
        agree_on_weights(plan, parts, digests, world)
        for part in parts.values():
            if part.optimizer is not None:
                part.optimizer.register_step_pre_hook(self._noting(part))

    def _noting(self, part: Part) -> Callable[..., None]:
        """Return a hook that keeps a copy of the gradients that the optimizer uses."""

        def note(*_: object) -> None:
            part.gradients.gather()
            for name, value in part.model.parameters().items():
                if value.grad is not None:
                    self.optimizer_gradients[name] = value.grad.detach().cpu().clone()

        return note

    def step(self, batch: Batch) -> Done:
        """Run one training step; return its results on rank 0."""
        self.optimizer_gradients.clear()
        for part in self.runtime.parts.values():
            if part.optimizer is not None:
                set_learning_rate(part.optimizer, batch.rate)
        torch.manual_seed(step_seed(self.config.seed, batch.position, self.world.rank))
        self.runtime.settings.draws.seed = step_seed(self.config.seed, batch.position, None)
        program = program_of(self.plan, batch.size, self.world.rank, True)
        scale = loss_scale(self.config)
        step = self.runtime.train(Step(program, *batch.local, loss_scale=scale))
        losses = self.world.gather(0.0 if step.loss_sum is None else float(step.loss_sum))
        return Done(sum(losses) / batch.size, self._gradients(), self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of all tensors of the model, on rank 0; NaN where replicas differ."""
        parts = self.runtime.parts
        local_tensors = {
            name: value for part in parts.values() for name, value in part.model.tensors().items()
        }
        differing = self._differing(local_tensors)
        tensors = gather_tensors(self.plan, parts, self.world)
        return _marked({name: value.clone() for name, value in tensors.items()}, differing)

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients that all optimizers used, on rank 0; NaN where replicas differ."""
        differing = self._differing(self.optimizer_gradients)
        gradients = dict(self.optimizer_gradients)
        firsts = {stage.ranks[0] for stage in self.plan.stages} - {0}
        if self.world.rank in firsts:
            self.world.send(self.optimizer_gradients, 0, GRADIENTS_TAG)()
        for rank in sorted(firsts) if self.world.rank == 0 else ():
            gradients = self.world.receive(rank, GRADIENTS_TAG) | gradients
        return _marked(gradients, differing)

    def _differing(self, local_tensors: Mapping[str, Tensor]) -> set[str]:
        """Return the names of tensors that differ between replicas, or that some do not hold."""
        digests = self.world.gather({name: digest(value) for name, value in local_tensors.items()})
        differing: set[str] = set()
        for stage in self.plan.stages:
            prefixes = tuple(f"{name}." for name in stage.components)
            names = {
                name for rank in stage.ranks for name in digests[rank] if name.startswith(prefixes)
            }
            differing |= {
                name
                for name in names
                if len({digests[rank].get(name) for rank in stage.ranks}) > 1
            }
        return differing


def _marked(tensors: Mapping[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {
        name: torch.full(value.shape, float("nan")) if name in names else value
        for name, value in tensors.items()
    }


def random_batch(
    size: int, image_size: int, classes: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 [size, image_size, image_size, 3] and labels int64 [size]."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (size, image_size, image_size, 3), dtype=np.uint8)
    return images, random.integers(0, classes, size)


def local_batch(
    plan: Plan, pieces: Cut, rank: int, images: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's images and labels of a global batch."""
    first, last = pieces.parts[0], pieces.parts[plan.last]
    return take_rows(images, first.get(rank, ())), take_rows(labels, last.get(rank, ()))
