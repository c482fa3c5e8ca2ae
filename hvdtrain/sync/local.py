"""Gradients of replicas that train apart: each updates its weights from its own samples."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from hvdtrain.plan.cut import Share
from hvdtrain.plan.marks import Reduction
from hvdtrain.sync.gradients import Gradients, SerialGradients
from hvdtrain.sync.saved import Shapes


@dataclass
class Trained:
    """Count of the samples that a replica has trained on without the others since the start."""

    samples: int = 0


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
