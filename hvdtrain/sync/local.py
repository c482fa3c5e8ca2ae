"""Local SGD: gradients of a replica alone, and averages of weights after every period."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from typing_extensions import override

from hvdtrain.plan.cut import Share
from hvdtrain.plan.marks import Reduction
from hvdtrain.sync.apart import Apart, Trained
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.gradients import Gradients, SerialGradients
from hvdtrain.sync.meetings import Shapes
from hvdtrain.sync.replica import Replica


class LocalGradients(SerialGradients):
    """The gradients of one of several replicas, over its own samples only.

    The loss is divided by the samples of the whole batch: the gradients are scaled to the mean
    over this replica's samples. Without samples there are no gradients, and the optimizer changes
    neither weights nor its state.

    Args:
        parameters: the stage's parameters by name.
        trained: counts the samples.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], trained: Trained) -> None:
        super().__init__(parameters)
        self.count = trained

    @override
    def start(self, share: Share) -> None:
        """Scale the gradients to the mean over this replica's samples."""
        self.count.samples += share.samples
        if not share.samples:
            self.zero()
            return
        super().start(share)
        gradients = [value.grad for value in self.parameters if value.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1 / share.weight)


class SwitchedGradients(Gradients):
    """Gradients that are exact in the first steps, and local afterwards.

    Args:
        exact: sums over the replicas.
        local: of this replica.
    """

    def __init__(self, exact: Gradients, local: LocalGradients) -> None:
        self.local, self.exact = local, exact
        self.current: Gradients = exact
        self.counts: dict[str, float] = {}

    def become_local(self) -> None:
        """Sum no gradients from now on; between two steps."""
        if self.current is not self.local:
            # The buckets of the exact gradients are free from now on.
            self.counts, self.exact = dict(self.exact.counted()), self.local
            self.current = self.local
            self.local.zero()

    def announce(self, share: Share) -> None:
        """Announce that the next backward completes the gradients."""
        self.current.announce(share)

    def start(self, share: Share) -> None:
        """Start the remaining reductions."""
        self.current.start(share)

    def finish(self) -> Reduction | None:
        """Return once every gradient is complete."""
        return self.current.finish()

    def are_finite(self) -> bool:
        """Return whether all gradients are finite."""
        return self.current.are_finite()

    def verdict(self) -> Tensor | None:
        """Return whether a gradient is not finite."""
        return self.current.verdict()

    def trained(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters."""
        return self.local.trained()

    def accept(self) -> None:
        """Count the step."""
        self.current.accept()

    def zero(self) -> None:
        """Reset the gradients."""
        self.current.zero()

    def counted(self) -> Mapping[str, float]:
        """Return what the exact steps have counted."""
        return {**self.exact.counted(), **self.counts}

    def saved(self) -> dict[str, Tensor]:
        """Return what the exact sums keep from step to step."""
        return self.exact.saved()

    def wanted(self, shapes: Shapes) -> frozenset[str]:
        """Return what the exact sums read."""
        return self.exact.wanted(shapes)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the exact sums what was saved."""
        self.exact.load(tensors)


class LocalMeetings(Apart):
    """Averages of weights, weighted by the samples since the last meeting.

    Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. From a later epoch on:
    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020.

    Args:
        averages_optimizer: whether the optimizer's state is averaged, too. Otherwise each replica
            keeps its own.
        gradients: exact at first; None: local from the start.
        exact_epochs: number of epochs with exact gradients.
    """

    def __init__(
        self,
        replica: Replica,
        collectives: Collectives,
        trained: Trained,
        period: int,
        averages_optimizer: bool = False,
        gradients: SwitchedGradients | None = None,
        exact_epochs: int = 0,
    ) -> None:
        super().__init__(replica, collectives, trained, period)
        self.averages_optimizer = averages_optimizer
        self.gradients, self.exact_epochs = gradients, exact_epochs
        self.is_exact = gradients is not None

    @override
    def before_step(self, epoch: int) -> None:
        """Make the gradients local in the first step after the exact epochs."""
        self.is_exact = epoch < self.exact_epochs
        if self.gradients is not None and not self.is_exact:
            self.gradients.become_local()

    @override
    def after_step(self, step: int) -> None:
        """Meet if the gradients are local and the step ends a period."""
        if not self.is_exact:
            super().after_step(step)

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
