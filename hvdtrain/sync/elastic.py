"""Elastic averaging: replicas train apart and are drawn to a common centre.

Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015: after every
period x_i <- x_i - a (x_i - c) and c <- c + a sum_i (x_i - c), with the centre c before the
meeting in both. All replicas hold the centre, and an all-reduce sums the distances.

The result of the method is the centre: evaluations and checkpoints see it. Before the next step
each replica takes its own weights back. Running statistics have no centre: replicas average them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from hvdtrain.sync.apart import Apart, Trained
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.replica import MODEL, Replica

FORCE = 0.9  # the sum of the rates of all replicas, in the paper's experiments


class ElasticMeetings(Apart):
    """Meetings of replicas that are drawn to a centre.

    Args:
        rate: share of the way to the centre; None: 0.9 / replicas.

    Attributes:
        centre: by parameter; None before the first step, when it is equal to the weights.
        local: this replica's parameters while the model holds the centre, else None.
    """

    def __init__(
        self,
        replica: Replica,
        collectives: Collectives,
        trained: Trained,
        period: int,
        rate: float | None = None,
    ) -> None:
        super().__init__(replica, collectives, trained, period)
        self.rate = FORCE / collectives.size if rate is None else rate
        self.centre: dict[str, Tensor] | None = None
        self.local: dict[str, Tensor] | None = None

    @override
    def before_step(self, epoch: int) -> None:
        """Take this replica's own weights back after an evaluation of the centre."""
        if self.centre is None:
            self.centre = self._copies()
        self._take_back()

    @override
    @torch.no_grad()
    def exchange(self) -> None:
        assert self.centre is not None, "a step comes before a meeting"
        parameters, statistics = self.replica.parameters, self.replica.averaged.values()
        distances = [value - self.centre[name] for name, value in parameters.items()]
        self.measure_drift(list(self.centre.values()))
        travelling = self.averager.start("meeting", list(statistics), self.samples, distances)
        for parameter, distance in zip(parameters.values(), distances, strict=True):
            parameter.sub_(distance, alpha=self.rate)
        agreed = self.averager.finish(travelling)
        for centre, total in zip(self.centre.values(), agreed.sums, strict=True):
            centre.add_(total, alpha=self.rate)
        for value, average in zip(statistics, agreed.averages, strict=True):
            value.copy_(average)
        self.copy_states(agreed.first)
        self.end_period()

    @override
    @torch.no_grad()
    def meet(self) -> None:
        """Meet if there was a step since the last meeting, and put the centre into the model."""
        if self.steps:
            self._take_back()  # after a resume inside a period the model holds the centre
            self.exchange()
        if self.centre is not None and self.local is None:
            self.local = self._copies()
            for name, parameter in self.replica.parameters.items():
                parameter.copy_(self.centre[name])
        self.differ = False

    @override
    def agreed(self) -> dict[str, Tensor]:
        """Return the centre, and the averages of all else, by name."""
        agreed = super().agreed()
        if self.differ and self.centre is not None:
            agreed |= {f"{MODEL}{name}": value for name, value in self.centre.items()}
        return agreed

    @override
    def local_weights(self) -> dict[str, Tensor]:
        local = {f"{MODEL}{name}": value for name, value in (self.local or {}).items()}
        return self.replica.weights() | local

    @override
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Load this replica's state; its parameters wait, because the model holds the centre."""
        local = {
            name: tensors[f"{MODEL}{name}"].to(value.device, copy=True)
            for name, value in self.replica.parameters.items()
            if f"{MODEL}{name}" in tensors
        }
        self.local, self.centre = local or None, self._copies() if local else None
        super().put(
            {k: value for k, value in tensors.items() if k.removeprefix(MODEL) not in local}
        )

    @torch.no_grad()
    def _take_back(self) -> None:
        if self.local is not None:
            for name, parameter in self.replica.parameters.items():
                parameter.copy_(self.local[name])
            self.local, self.differ = None, True

    def _copies(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.replica.parameters.items()}
