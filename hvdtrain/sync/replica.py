"""The state of one of several replicas that train apart, by the names of a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hvdtrain.sync.states import States

MODEL, OPTIMIZER = "model/", "optimizer/"


@dataclass(frozen=True)
class Replica:
    """Weights, buffers and optimizer of a stage on this rank.

    Attributes:
        parameters: trainable, by name.
        statistics: running statistics of batch norms, by name.
        states: the other buffers that forwards change; its `put` accepts any tensor of the stage.
        optimizer: None if there are no parameters.
        complete: creates the state of parameters that the optimizer has not updated yet, as zeros.
    """

    parameters: Mapping[str, nn.Parameter]
    statistics: Mapping[str, Tensor]
    states: States
    optimizer: torch.optim.Optimizer | None
    complete: Callable[[], None] = lambda: None

    @property
    def averaged(self) -> dict[str, Tensor]:
        """Statistics that replicas average: means and variances."""
        return {k: value for k, value in self.statistics.items() if value.is_floating_point()}

    @property
    def copied(self) -> States:
        """Buffers that replicas take from the first one with samples: counters, and others."""
        counters = {k: value for k, value in self.statistics.items() if k not in self.averaged}
        return States(lambda: {**counters, **self.states.find()}, self.states.put)

    def moments(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors by their names in a checkpoint, with step counters."""
        if self.optimizer is None:
            return {}
        self.complete()
        return {
            f"{OPTIMIZER}{name}/{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def weights(self) -> dict[str, Tensor]:
        """Return all tensors that training changes, by their names in a checkpoint."""
        tensors = {**self.parameters, **self.statistics, **self.states.find()}
        return {f"{MODEL}{name}": tensor.detach() for name, tensor in tensors.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors with the names of `weights` and `moments` into this replica."""
        self.states.put(
            {
                name.removeprefix(MODEL): value
                for name, value in tensors.items()
                if name.startswith(MODEL)
            }
        )
        for name, value in self.moments().items():
            if name in tensors:
                value.copy_(tensors[name])
