"""The components and the machine of a run, for the planner's measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hvdtrain.backends.pytorch.parts import build_model, stage_optimizer
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import InputSize, TargetForm
from hvdtrain.engine.machine import machine_of
from hvdtrain.models.component import Component
from hvdtrain.models.costs import component_costs
from hvdtrain.models.losses import loss_of
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.stage import AUTOCAST, DTYPES, Images, StageModel
from hvdtrain.planner.measure import Subject
from hvdtrain.planner.probe import Start, Tools
from hvdtrain.world import World


@dataclass(frozen=True)
class TorchParts:
    """Components as training builds them, but without recomputation.

    In a plan the forward of a recomputed component counts twice.
    """

    config: TrainConfig
    components: Mapping[str, Component]
    device: torch.device

    def model(self, name: str) -> StageModel:
        """Return a component's model."""
        return build_model([self.components[name]], self.config, self.device)

    def optimizer(self, model: StageModel) -> torch.optim.Optimizer | None:
        """Return the optimizer of a model; None if it has no parameters."""
        return stage_optimizer(self.config, model)

    def exchange(self, world: World) -> Exchange:
        """Return the transfers between ranks. Collective."""
        return machine_of(world).whole_exchange(world, self.device)

    def tools(self, start: Start, world: World) -> Tools:
        """Return the operations whose times are measured."""
        return machine_of(world).tools(start, world, self.device)


def subject_of(
    config: TrainConfig,
    components: Sequence[Component],
    image_size: InputSize,
    form: TargetForm,
    images: Images,
) -> Subject:
    """Return the subject that a run measures.

    Args:
        form: of the targets.
    """
    dtype = DTYPES[config.precision]
    autocast = images.device.type if config.precision in AUTOCAST else None
    costs = component_costs(components, image_size, dtype=dtype, autocast=autocast)
    parts = TorchParts(config, {part.name: part for part in components}, images.device)
    loss = partial(loss_of(config).example_sum, form)
    return Subject(config, parts, costs, image_size, images, loss)
