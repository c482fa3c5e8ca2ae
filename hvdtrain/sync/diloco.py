"""DiLoCo: replicas train apart, and an outer optimizer follows the average of their changes.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv
2311.08105. The outer gradient is the start of the period minus the average of the replicas; SGD
with Nesterov momentum updates the start with it, and all replicas continue from there.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from hvdtrain.sync.apart import Apart, Trained
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.meetings import Shapes
from hvdtrain.sync.replica import Replica


class DiLoCoMeetings(Apart):
    """Meetings with an outer optimizer.

    Args:
        rate: learning rate of the outer optimizer.
        outer_momentum: Nesterov's, by PyTorch's formula.

    Attributes:
        start: the parameters after the last meeting, the same on all replicas; empty before the
            first step.
        momentum: of the outer optimizer, per parameter.
    """

    def __init__(
        self,
        replica: Replica,
        collectives: Collectives,
        trained: Trained,
        period: int,
        rate: float,
        outer_momentum: float,
    ) -> None:
        super().__init__(replica, collectives, trained, period)
        self.rate, self.outer_momentum = rate, outer_momentum
        self.start: list[Tensor] = []
        self.momentum: list[Tensor] = []

    @override
    def before_step(self, epoch: int) -> None:
        """Note the weights from which all replicas start, before the first step."""
        if not self.start:
            parameters = [value.detach() for value in self.replica.parameters.values()]
            self.start = [value.clone() for value in parameters]
            self.momentum = [torch.zeros_like(value) for value in parameters]

    @override
    @torch.no_grad()
    def exchange(self) -> None:
        parameters = list(self.replica.parameters.values())
        buffers = list(self.replica.averaged.values())
        changes = [start - value for start, value in zip(self.start, parameters, strict=True)]
        travelling = self.averager.start("meeting", [*changes, *buffers], self.samples)
        agreed = self.averager.finish(travelling)
        gradients = agreed.averages[: len(changes)]
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        self.drift = float(torch.stack(norms).square().sum().sqrt()) if norms else 0.0
        for start, momentum, gradient in zip(self.start, self.momentum, gradients, strict=True):
            momentum.mul_(self.outer_momentum).add_(gradient)
            start.sub_(gradient.add(momentum, alpha=self.outer_momentum), alpha=self.rate)
        targets = [*self.start, *agreed.averages[len(changes) :]]
        for value, target in zip([*parameters, *buffers], targets, strict=True):
            value.copy_(target)
        self.copy_states(agreed.first)
        self.differ = False
        self.end_period()

    @override
    def saved(self) -> dict[str, Tensor]:
        """Return this replica's state; the first one adds what is the same on all."""
        saved = super().saved()
        if self.collectives.place == 0 and self.start:
            for kind, tensors in (("start", self.start), ("momentum", self.momentum)):
                names = self._names(kind)
                saved |= dict(zip(names, tensors, strict=True))
        return saved

    @override
    def wanted(self, shapes: Shapes) -> frozenset[str]:
        """Return the replica's state, and the state of the outer optimizer."""
        outer = {*self._names("start"), *self._names("momentum")}
        return super().wanted(shapes) | (outer & shapes.keys())

    @override
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue as the replica that saved this state, with the same outer optimizer."""
        self.start, self.momentum = (
            self._loaded(tensors, "start"),
            self._loaded(tensors, "momentum"),
        )
        super().load(tensors)

    def _names(self, kind: str) -> list[str]:
        return [f"outer/{kind}/{name}" for name in self.replica.parameters]

    def _loaded(self, tensors: Mapping[str, Tensor], kind: str) -> list[Tensor]:
        """Return copies in the memory format of the parameters; none if any is missing."""
        names, parameters = self._names(kind), self.replica.parameters.values()
        if not tensors.keys() >= set(names):
            return []
        return [
            torch.empty_like(parameter, requires_grad=False).copy_(tensors[name])
            for name, parameter in zip(names, parameters, strict=True)
        ]
