"""What a rank holds of one stage."""

from dataclasses import dataclass

import torch
from torch import nn

from hvdtrain.parallel.reduce import Gradients
from hvdtrain.parallel.stage import StageModel


@dataclass
class Part:
    """A replica of a stage; the optimizer is None where nothing is trained.

    Attributes:
        is_first_replica: whether the norm of the stage's gradients comes from this rank.
        synchronised: whether forward and backward communicate, so that all replicas take part.
    """

    model: StageModel
    gradients: Gradients
    optimizer: torch.optim.Optimizer | None
    is_first_replica: bool = True
    synchronised: bool = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained."""
        return list(self.model.parameters().values())
