"""Does a plan compute what the serial run computes? Steps of each, side by side.

Each serial step begins with what the ranks hold then, so that rounding errors do not add up, and
its optimizer is given the ranks' own gradients: gradients and updates are compared apart.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.models.component import Component
from hvdtrain.parallel.cut import Cut, cut
from hvdtrain.parallel.part import Part
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.parallel.stage import Images, digest
from hvdtrain.parallel.step import Step
from hvdtrain.training.batches import check_sizes, given_to
from hvdtrain.training.build import build_runtime
from hvdtrain.training.feed import taken
from hvdtrain.training.layout import agree_on_weights, gather_tensors
from hvdtrain.training.optimizer import set_learning_rate
from hvdtrain.training.parity import Parity
from hvdtrain.training.programs import program_of
from hvdtrain.training.randomness import step_seed
from hvdtrain.training.serialrun import Batch, Done, SerialRun
from hvdtrain.world import World

MEAN, STD = [0.5] * 3, [0.25] * 3
GRADIENTS_TAG = 2


def check_plan(
    config: TrainConfig,
    components: Sequence[Component],
    plan: Plan,
    image_size: int,
    classes: int,
    here: World,
    device: torch.device | str = "cpu",
    synchronous: bool = False,
    sizes: Sequence[int] | None = None,
) -> Parity:
    """Steps under a plan, and serially on rank 0 from the same weights and batches. Collective.

    Images are random, from the seed of the configuration.

    Args:
        synchronous: as in `Exchange`.
        sizes: of the batches; by default a whole one, one of about two thirds (the last one of an
            epoch, where no epoch is known) if the model can take it, and a whole one.
    """
    images, size = Images(MEAN, STD, torch.device(device), config.precision), config.batch_size
    batches = []
    for number, count in enumerate(sizes or _sizes(config, components, plan, image_size, classes)):
        whole = random_batch(count, image_size, classes, config.seed + number)
        step = my_step(plan, cut(plan, count), here.rank, *whole)
        own, rate = (step.images, step.labels), config.learning_rate()
        batches.append(Batch(count, number * size, own, whole, rate))
    return compare(config, components, plan, batches, images, here, synchronous)


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
        given = given_to(components, config, image_size, classes)
        check_sizes(config, plan, components, given, [tail])
    except UsageError:
        return size, size
    return size, tail, size


def compare(
    config: TrainConfig,
    components: Sequence[Component],
    plan: Plan,
    batches: Sequence[Batch],
    images: Images,
    here: World,
    synchronous: bool = False,
) -> Parity:
    """Steps under a plan on these batches, and serially. Collective.

    All that is built for it is gone when it returns, and no generator has moved.
    """
    config = replace(config, trace=None)
    if config.gradient_limit is not None:  # these steps are judged as others, but none is bad
        config = replace(config, gradient_limit=sys.float_info.max)
    image_size = batches[0].own[0].shape[1]
    with torch.random.fork_rng():
        ranks = _Ranks(
            build_runtime(config, plan, components, images, image_size, here, synchronous),
            *(plan, here, config.seed),
        )
        serial = SerialRun(config, components, plan, images) if here.rank == 0 else None
        try:
            before = ranks.tensors()
            for batch in batches:
                done = ranks.step(batch)
                if serial is not None:
                    serial.compare(batch, done, before)
                here.barrier()  # which no watchdog counts, as it would the wait in a step
                before = done.tensors
        finally:
            ranks.close()
    parity: Parity = here.broadcast(serial.parity() if serial is not None else None)
    return parity


class _Ranks:
    """The runtime under test, and what all replicas hold. All methods are collective."""

    def __init__(self, runtime: Runtime, plan: Plan, here: World, seed: int) -> None:
        self.runtime, self.plan, self.here, self.seed = runtime, plan, here, seed
        self.given: dict[str, Tensor] = {}
        parts = runtime.parts
        digests = {n: own for part in parts.values() for n, own in part.model.digests().items()}
        agree_on_weights(plan, parts, digests, here)
        for part in parts.values():
            if part.optimizer is not None:
                part.optimizer.register_step_pre_hook(self._noting(part))

    def _noting(self, part: Part) -> Callable[..., None]:
        """What keeps the gradients that an optimizer is given."""

        def note(*_: object) -> None:
            for name, value in part.model.parameters().items():
                if value.grad is not None:
                    self.given[name] = value.grad.detach().cpu().clone()

        return note

    def step(self, batch: Batch) -> Done:
        """One training step; what it did, on rank 0."""
        self.given.clear()
        for part in self.runtime.parts.values():
            if part.optimizer is not None:
                set_learning_rate(part.optimizer, batch.rate)
        torch.manual_seed(step_seed(self.seed, batch.position, self.here.rank))
        self.runtime.draws.seed = step_seed(self.seed, batch.position, None)
        program = program_of(self.plan, batch.size, self.here.rank, True)
        step = self.runtime.train(program, Step(*batch.own))
        losses = self.here.gather(0.0 if step.loss_sum is None else float(step.loss_sum))
        return Done(sum(losses) / batch.size, self._gradients(), self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Copies of all parameters and buffers, on rank 0; NaN where replicas differ by a bit."""
        parts = self.runtime.parts
        own = {n: value for part in parts.values() for n, value in part.model.tensors().items()}
        differing = self._differing(own)
        found = gather_tensors(self.plan, parts, self.here)
        return _marked({name: value.clone() for name, value in found.items()}, differing)

    def _gradients(self) -> dict[str, Tensor]:
        """What all optimizers were given, on rank 0; NaN where replicas differ by a bit."""
        differing, found = self._differing(self.given), dict(self.given)
        firsts = {stage.ranks[0] for stage in self.plan.stages} - {0}
        if self.here.rank in firsts and self.here.communicator is not None:
            self.here.communicator.send(self.given, 0, GRADIENTS_TAG)
        for rank in sorted(firsts) if self.here.rank == 0 else ():
            found = self.here.receive(rank, GRADIENTS_TAG) | found
        return _marked(found, differing)

    def _differing(self, own: Mapping[str, Tensor]) -> set[str]:
        """Names of what the replicas of a stage do not hold alike, or not all of them hold."""
        told = self.here.gather({name: digest(value) for name, value in own.items()})
        found: set[str] = set()
        for stage in self.plan.stages:
            prefixes = tuple(f"{name}." for name in stage.components)
            names = {name for r in stage.ranks for name in told[r] if name.startswith(prefixes)}
            found |= {n for n in names if len({told[rank].get(n) for rank in stage.ranks}) > 1}
        return found

    def close(self) -> None:
        """Stop watching."""
        if self.runtime.activity is not None:
            self.runtime.activity.close()


def _marked(tensors: Mapping[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {
        name: torch.full(value.shape, float("nan")) if name in names else value
        for name, value in tensors.items()
    }


def random_batch(
    size: int, image_size: int, classes: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [size, image_size, image_size, 3] and labels int64 [size]."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (size, image_size, image_size, 3), dtype=np.uint8)
    return images, random.integers(0, classes, size)


def my_step(plan: Plan, pieces: Cut, rank: int, images: np.ndarray, labels: np.ndarray) -> Step:
    """This rank's part of a whole batch."""
    first, last = pieces.parts[0], pieces.parts[plan.last]
    return Step(taken(images, first.get(rank, ())), taken(labels, last.get(rank, ())))
