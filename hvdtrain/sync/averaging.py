"""Local SGD: replicas train apart and average their weights after every period."""

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from hvdtrain.sync.apart import Apart
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.local import SwitchedGradients, Trained
from hvdtrain.sync.replica import Replica
from hvdtrain.sync.saved import Kept, Shapes


class LocalMeetings(Apart):
    """Averages of weights, weighted by the samples since the last meeting.

    Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.

    Args:
        averages_optimizer: whether the optimizer's state is averaged, too. Otherwise each replica
            keeps its own.
    """

    def __init__(
        self,
        replica: Replica,
        collectives: Collectives,
        trained: Trained,
        period: int,
        averages_optimizer: bool = False,
    ) -> None:
        super().__init__(replica, collectives, trained, period)
        self.averages_optimizer = averages_optimizer

    @override
    @torch.no_grad()
    def exchange(self) -> None:
        parameters = list(self.replica.parameters.values())
        tensors = [*parameters, *self.replica.averaged.values()]
        if self.averages_optimizer:
            tensors += self.replica.moments().values()
        agreed = self.averager.finish(self.averager.start("meeting", tensors, self.samples))
        self.measure_drift(agreed.averages[: len(parameters)])
        for tensor, average in zip(tensors, agreed.averages, strict=True):
            tensor.copy_(average)
        self.copy_states(agreed.first)
        self.differ, self.has_local_state = False, not self.averages_optimizer
        self.end_period()


class PostLocalMeetings(Kept):
    """Local SGD from an epoch on; before that replicas agree in every step.

    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020.

    Args:
        local: the meetings once the gradients are local.
        gradients: exact at first.
        exact_epochs: number of epochs with exact gradients.
    """

    def __init__(
        self, local: LocalMeetings, gradients: SwitchedGradients, exact_epochs: int
    ) -> None:
        self.local, self.gradients, self.exact_epochs = local, gradients, exact_epochs
        self.is_exact = True

    @property
    def differ(self) -> bool:
        """Return whether replicas may hold different weights now."""
        return self.local.differ

    def before_step(self, epoch: int) -> None:
        """Make the gradients local in the first step after the exact epochs."""
        self.is_exact = epoch < self.exact_epochs
        if not self.is_exact:
            self.gradients.become_local()

    def after_step(self, step: int) -> None:
        """Meet if the gradients are local and the step ends a period."""
        if not self.is_exact:
            self.local.after_step(step)

    def meet(self) -> None:
        """Meet if there was a local step since the last meeting."""
        self.local.meet()

    def counted(self) -> Mapping[str, float]:
        """Return what the meetings have counted."""
        return self.local.counted()

    def agreed(self) -> dict[str, Tensor]:
        """Return the averages for a checkpoint by name."""
        return self.local.agreed()

    def saved(self) -> dict[str, Tensor]:
        """Return this replica's own state, if it may differ from that of the others."""
        return self.local.saved()

    def wanted(self, shapes: Shapes) -> frozenset[str]:
        """Return the state of the replica at this place."""
        return self.local.wanted(shapes)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue as the replica that saved this state."""
        self.local.load(tensors)
