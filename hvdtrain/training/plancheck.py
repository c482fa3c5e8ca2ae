"""Does a plan compute the gradients of the serial step? One step of each, side by side."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hvdtrain.config import TrainConfig
from hvdtrain.models.component import Component
from hvdtrain.parallel import schedule
from hvdtrain.parallel.cut import Cut, cut
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.program import program
from hvdtrain.parallel.reference import Serial, largest_errors, serial_step
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.parallel.stage import Images
from hvdtrain.parallel.step import Step
from hvdtrain.training.build import build_runtime
from hvdtrain.training.feed import taken
from hvdtrain.training.layout import gather_tensors
from hvdtrain.training.parts import build_model
from hvdtrain.training.setup import make_plan
from hvdtrain.world import World

# DESIGN's bounds; bf16 keeps 8 bits, and its sums are cut elsewhere under another plan.
TOLERANCES = {"fp64": 1e-12, "fp32": 1e-4, "bf16": 0.1}
LOOSER = {("fp64", "resnet50"): 1e-11}
MEAN, STD = [0.5] * 3, [0.25] * 3
GRADIENTS_TAG = 2


@dataclass(frozen=True)
class Parity:
    """How far a step under a plan is from the serial step, by the design's measure.

    Attributes:
        parameters: the relative error of each parameter's gradient.
        statistics: the largest relative error of a running statistic.
        loss: the relative error of the loss.
        tolerance: what is allowed at this precision.
    """

    parameters: dict[str, float]
    statistics: float
    loss: float
    tolerance: float

    @property
    def largest(self) -> float:
        """The largest error anywhere."""
        return max(self.statistics, self.loss, *self.parameters.values())

    @property
    def is_within(self) -> bool:
        """Whether the plan computes the serial step."""
        return self.largest <= self.tolerance

    def by_component(self, components: Sequence[str]) -> dict[str, float]:
        """The largest error in each component; components without parameters are left out."""
        found: dict[str, float] = defaultdict(float)
        for name, error in self.parameters.items():
            owner = next(part for part in components if name.startswith(f"{part}."))
            found[owner] = max(found[owner], error)
        return dict(found)


def check_plan(
    config: TrainConfig,
    components: Sequence[Component],
    image_size: int,
    classes: int,
    here: World,
    plan: Plan | None = None,
    device: torch.device | str = "cpu",
    synchronous: bool = False,
) -> Parity:
    """One step under a plan, and serially on rank 0 from the same weights and batch. Collective.

    Images are random, from the seed of the configuration.

    Args:
        plan: instead of that of the configuration. synchronous: as in `Exchange`.
    """
    plan = plan or make_plan(config, components, image_size, classes, here.size)
    images = Images(MEAN, STD, torch.device(device), config.precision)
    runtime = build_runtime(config, plan, components, images, image_size, here, synchronous)
    held = gather_tensors(plan, runtime.parts, here)
    before = {name: tensor.clone() for name, tensor in held.items()}
    batch = random_batch(config.batch_size, image_size, classes, config.seed)
    pieces = cut(plan, config.batch_size)
    step = my_step(plan, pieces, here.rank, *batch)
    actions = schedule.training_step(plan, pieces)[here.rank]
    mine = runtime.gradients(program(plan, pieces, actions, here.rank), step)
    found = _gather(plan, runtime, mine, here)
    after = gather_tensors(plan, runtime.parts, here)
    loss = sum(here.gather(0.0 if step.loss_sum is None else float(step.loss_sum)))
    if runtime.activity is not None:
        runtime.activity.close()
    parity = None
    if here.rank == 0:
        serial = _serial(config, components, plan, pieces, before, batch, images)
        parity = _compare(config, serial, found, after, loss / config.batch_size)
    result: Parity = here.broadcast(parity)
    return result


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


def _serial(
    config: TrainConfig,
    components: Sequence[Component],
    plan: Plan,
    pieces: Cut,
    weights: dict[str, Tensor],
    batch: tuple[np.ndarray, np.ndarray],
    images: Images,
) -> Serial:
    model = build_model(components, config, images.device)
    with torch.no_grad():
        for name, tensor in model.tensors().items():
            tensor.copy_(weights[name])
    return serial_step(
        model.components,
        *(plan, pieces, images(batch[0]), torch.from_numpy(batch[1]).to(images.device)),
        batch_norm=config.batch_norm,
        bf16=config.precision == "bf16",
        label_smoothing=config.label_smoothing,
    )


def _compare(
    config: TrainConfig,
    serial: Serial,
    found: dict[str, Tensor],
    after: dict[str, Tensor],
    loss: float,
) -> Parity:
    statistics = largest_errors(
        {name: after[name] for name in serial.statistics},
        {name: value.cpu() for name, value in serial.statistics.items()},
    )
    return Parity(
        largest_errors(found, {name: value.cpu() for name, value in serial.gradients.items()}),
        max(statistics.values(), default=0.0),
        _relative(loss, serial.loss),
        LOOSER.get((config.precision, config.model), TOLERANCES[config.precision]),
    )


def _relative(found: float, reference: float) -> float:
    error = abs(found - reference) / max(abs(reference), 1e-30)
    return error if error == error else float("inf")  # not a number is no match


def _gather(
    plan: Plan, runtime: Runtime, mine: dict[str, Tensor], here: World
) -> dict[str, Tensor]:
    """All gradients on rank 0; not a number where replicas differ, be it by a bit."""
    found: dict[str, Tensor] = {}
    own = {name: value.cpu() for name, value in mine.items()}
    if here.communicator is not None and here.rank != 0:
        here.communicator.send(own, 0, GRADIENTS_TAG)
        return found
    for rank in range(here.size):
        theirs = own
        if rank != 0 and here.communicator is not None:
            theirs = here.receive(rank, GRADIENTS_TAG)
        for name, value in theirs.items():
            if not torch.equal(found.setdefault(name, value), value):
                found[name] = torch.full_like(value, float("nan"))  # replicas must be equal
    return found
