"""One rank's replica of a stage."""

from dataclasses import dataclass

import torch
from torch import nn

from hvdtrain.parallel.reduce import Gradients
from hvdtrain.parallel.stage import StageModel


@dataclass
class Part:
    """One rank's replica of a stage.

    Attributes:
        optimizer: None if the stage has no trainable parameters.
        is_first_replica: whether this rank contributes the norm of the stage's gradients.
        synchronised: whether forward and backward communicate, so that every replica must run
            them even without samples.
    """

    model: StageModel
    gradients: Gradients
    optimizer: torch.optim.Optimizer | None
    is_first_replica: bool = True
    synchronised: bool = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, in the order of the model."""
        return list(self.model.parameters().values())
