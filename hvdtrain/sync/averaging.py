"""Local SGD: replicas train apart and average their weights after every period."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hvdtrain.sync.apart import Apart
from hvdtrain.sync.average import Agreed
from hvdtrain.sync.changes import MakeChanges
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.local import SwitchedGradients, Trained
from hvdtrain.sync.replica import Replica
from hvdtrain.sync.saved import Kept, Shapes

BEFORE = "period/before/"


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
        others = list(self.replica.averaged.values())
        if self.averages_optimizer:
            others += self.replica.moments().values()
        tensors = [*parameters, *others]
        agreed = self.average(parameters, others)
        self.measure_drift(agreed.averages[: len(parameters)])
        for tensor, average in zip(tensors, agreed.averages, strict=True):
            tensor.copy_(average)
        self.copy_states(agreed.first)
        self.differ, self.has_local_state = False, not self.averages_optimizer
        self.end_period()

    def average(self, parameters: Sequence[Tensor], others: Sequence[Tensor]) -> Agreed:
        """Return the averages of all parameters and of other tensors over the replicas."""
        tensors = [*parameters, *others]
        return self.averager.finish(self.averager.start("meeting", tensors, self.samples))


class CompressedLocalMeetings(LocalMeetings):
    """Averages of weights whose changes since the last meeting travel compressed.

    All replicas keep the weights of the last meeting, and add the average change to them.

    Args:
        make_changes: makes the averages of the parameters of one dtype or several.
        whole: names of parameters that travel as they are.

    Attributes:
        before: the compressed parameters at the start of the period by name, the same on all
            replicas.
    """

    def __init__(
        self,
        replica: Replica,
        collectives: Collectives,
        trained: Trained,
        period: int,
        averages_optimizer: bool,
        make_changes: MakeChanges,
        whole: Collection[str] = (),
    ) -> None:
        super().__init__(replica, collectives, trained, period, averages_optimizer)
        self.compressed = {k: v for k, v in replica.parameters.items() if k not in whole}
        self.changes = [make_changes("meeting", self.compressed, self.averager)]
        self.before: dict[str, Tensor] = {}

    @override
    @torch.no_grad()
    def before_step(self, epoch: int) -> None:
        """Note the weights of the last meeting, before the first step after it."""
        if self.steps:
            return
        for name, parameter in self.compressed.items():
            if name not in self.before:
                self.before[name] = torch.empty_like(parameter, requires_grad=False)
            self.before[name].copy_(parameter)

    @override
    def average(self, parameters: Sequence[Tensor], others: Sequence[Tensor]) -> Agreed:
        compressed, (changes,) = self.compressed, self.changes
        whole = {k: v for k, v in self.replica.parameters.items() if k not in compressed}
        moved = [value - self.before[name] for name, value in compressed.items()]
        travelling = changes.start(moved, [*whole.values(), *others], self.samples)
        agreed = changes.finish(travelling)
        names, count = [*compressed, *whole], len(self.replica.parameters)
        averages = dict(zip(names, agreed.averages[:count], strict=True))
        averages |= {name: averages[name] + self.before[name] for name in compressed}
        ordered = [averages[name] for name in self.replica.parameters]
        return Agreed([*ordered, *agreed.averages[count:]], agreed.sums, agreed.weights)

    @override
    def saved(self) -> dict[str, Tensor]:
        """Return this replica's state; inside a period the first one adds where it started."""
        is_first = self.steps and not self.collectives.place
        before = {f"{BEFORE}{name}": value for name, value in self.before.items()}
        return {**super().saved(), **(before if is_first else {})}

    @override
    def period_names(self) -> frozenset[str]:
        return super().period_names() | {f"{BEFORE}{name}" for name in self.compressed}

    @override
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue as the replica that saved this state, from where its period started."""
        super().load(tensors)
        self.before = {
            name: torch.empty_like(parameter, requires_grad=False).copy_(value)
            for name, parameter in self.compressed.items()
            if (value := tensors.get(f"{BEFORE}{name}")) is not None
        }


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
            self.local.before_step(epoch)

    def after_step(self, step: int) -> None:
        """Meet if the gradients are local and the step ends a period."""
        if self.is_exact:
            self.local.count_update()
        else:
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
