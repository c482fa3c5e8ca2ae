"""The model that the planner measures, with the settings of a run."""

import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hvdtrain.config import TrainConfig
from hvdtrain.models.costs import ComponentCost
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.stage import Images, StageModel
from hvdtrain.plan.planfile import recomputed_components
from hvdtrain.planner.agreement import NONE
from hvdtrain.planner.probe import Start, Tools
from hvdtrain.planner.profilefile import model_words, precision_words
from hvdtrain.sync.engine import reduction_library
from hvdtrain.world import World


class Parts(Protocol):
    """Builds the components of a framework for the planner's measurements."""

    def model(self, name: str) -> StageModel:
        """Return a component's model, in the order and dtype of training."""

    def optimizer(self, model: StageModel) -> torch.optim.Optimizer | None:
        """Return the optimizer of a model; None if it has no parameters."""

    def exchange(self, world: World) -> Exchange:
        """Return the transfers between ranks, at the sizes that are sent. Collective."""

    def tools(self, start: Start, world: World) -> Tools:
        """Return the operations whose times are measured.

        Args:
            start: starts the all-reduces of training.
        """


@dataclass(frozen=True)
class Subject:
    """The model that is measured, with the settings of a run.

    Attributes:
        parts: builds the components.
        costs: costs of the components, in their order.
        image_size: height and width in pixels.
        loss: returns the sum of the losses of outputs, for any targets.
    """

    config: TrainConfig
    parts: Parts
    costs: Sequence[ComponentCost]
    image_size: int
    images: Images
    loss: Callable[[torch.Tensor], torch.Tensor]

    @property
    def names(self) -> list[str]:
        """Names of the components."""
        return [cost.name for cost in self.costs]

    @property
    def recomputed(self) -> Collection[str]:
        """Names of the components that are recomputed in backward."""
        return recomputed_components(self.config.recompute, self.names)

    @property
    def methods(self) -> tuple[str, ...]:
        """Values of `--compress` whose seconds are measured."""
        return () if self.config.compress == NONE else (self.config.compress,)

    def words(self, world: World) -> str:
        """Return the settings that decide the measurements. Collective.

        A profile of equal settings is valid for this subject on these ranks.
        """
        config, hosts = self.config, world.gather(socket.gethostname())
        places = ",".join(str(list(dict.fromkeys(hosts)).index(host)) for host in hosts)
        library = reduction_library(config.reduce_with, world)
        reduction = f"{config.allreduce}{' by MPI' if library == 'mpi' else ''}"
        coded = f", compress {' '.join(self.methods)}" if self.methods else ""
        return (
            f"{model_words(config, self.costs, self.image_size)}, {config.batch_size} images, "
            f"{precision_words(config)}, all-reduce {reduction}{coded}, "
            f"{self.images.device.type}, ranks on hosts {places} x {world.threads} threads"
        )
