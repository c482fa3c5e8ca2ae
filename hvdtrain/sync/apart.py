"""Replicas that train apart: their state, their averages, and their periods."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from hvdtrain.options.requests import DiLoCo, Elastic, Local
from hvdtrain.plan.cut import Share
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.states import MODEL, CopiedStates, Kept, Replica, Shapes

COUNTS = "counts/"


class Meetings(Kept):
    """The meetings of one stage's replicas; of those that agree in every step there are none.

    All methods are collective among the replicas.

    Attributes:
        differ: whether the replicas may hold different weights now.
    """

    differ: bool = False

    def before_step(self, epoch: int) -> None:
        """Prepare for a step of training.

        Args:
            epoch: of the step, from 0.
        """
        return

    def after_step(self, step: int) -> None:
        """Meet if it is due after a step of all replicas.

        Args:
            step: of the epoch, from 1, so that the meetings of an epoch do not depend on where
                the run was resumed.
        """
        return

    def meet(self) -> None:
        """Agree now: before an evaluation, and at the end of the run."""
        return

    def averages(self) -> Mapping[str, Tensor]:
        """Return what all replicas would hold if they agreed now, by the names of a checkpoint.

        Checkpoints hold these tensors instead of those of one replica; tensors in which replicas
        do not differ are left out.
        """
        return {}

    def counted(self) -> Mapping[str, float]:
        """Return what this rank has counted since the start, by name, such as meetings."""
        return {}


@dataclass
class SampleCount:
    """Count of the samples that a replica has trained on without the others since the start."""

    samples: int = 0


class Apart(Meetings, ABC):
    """Replicas that take local steps, and meet after every period of steps of an epoch.

    Between two meetings a checkpoint holds the average of all replicas as the model, and each
    replica's own state beside it, under `replica/<place>/`. A run that is resumed with the same
    stage on as many replicas continues bit by bit; any other continues from the average.

    Args:
        replica: this rank's.
        collectives: among the replicas.
        trained: counts this replica's samples.
        request: the period, and what else the method takes.

    Attributes:
        differ: whether replicas may hold different weights now.
        has_local_state: whether anything of this replica may differ from the others.
        steps: since replicas last agreed on all weights.
    """

    def __init__(
        self,
        replica: Replica,
        collectives: Collectives,
        trained: SampleCount,
        request: Local | DiLoCo | Elastic,
    ) -> None:
        self.replica, self.collectives, self.trained = replica, collectives, trained
        self.request = request
        self.copies = CopiedStates(replica.copied, collectives)
        self.has_local_state = False
        self.steps, self.samples_before = 0, trained.samples
        self.meetings, self.drift = 0, 0.0

    @property
    def samples(self) -> int:
        """Samples of this replica since replicas last agreed."""
        return self.trained.samples - self.samples_before

    def after_step(self, step: int) -> None:
        """Meet if the step ends a period."""
        self.count_step()
        if step % self.request.period == 0:
            self.exchange()

    def count_step(self) -> None:
        """Note that the replicas have made a step without each other."""
        self.steps += 1
        self.differ = self.has_local_state = True

    def meet(self) -> None:
        """Meet if there was a step since the last meeting."""
        if self.steps:
            self.exchange()

    @abstractmethod
    def exchange(self) -> None:
        """Meet now."""

    def end_period(self) -> None:
        """Note that a meeting is over."""
        self.start_period()
        self.meetings += 1

    def start_period(self) -> None:
        """Note that all replicas hold the same weights."""
        self.steps, self.samples_before = 0, self.trained.samples

    def counted(self) -> Mapping[str, float]:
        """Return meetings, bytes sent, and the norm of the change of weights by the last one."""
        return {
            "meetings": self.meetings,
            "sent_bytes": self.collectives.sent_bytes,
            "drift": self.drift,
        }

    def measure_drift(self, averages: Sequence[Tensor]) -> None:
        """Store the distance between this replica's parameters and their averages."""
        parameters = self.replica.parameters.values()
        with torch.no_grad():
            norms = [
                torch.linalg.vector_norm(average - parameter)
                for parameter, average in zip(parameters, averages, strict=True)
            ]
            self.drift = float(torch.stack(norms).square().sum().sqrt()) if norms else 0.0

    def copy_states(self, first: int) -> None:
        """Copy counters and other buffers from the replica at the place `first`."""
        is_first = self.collectives.place == first
        self.copies.start(Share(float(is_first), is_first))
        self.copies.finish()

    @torch.no_grad()
    def averages(self) -> dict[str, Tensor]:
        """Return the averages for a checkpoint by name; empty if replicas do not differ.

        Collective among the replicas.
        """
        if not self.has_local_state:
            return {}
        tensors = self.replica.moments()
        if self.differ:
            named = {**self.replica.parameters, **self.replica.averaged}
            tensors |= {f"{MODEL}{name}": value for name, value in named.items()}
        weight = self.samples if self.steps else 1.0
        values = list(tensors.values())
        averages = weighted_average(self.collectives, "checkpoint", values, weight).averages
        return {
            name: average.to(value.dtype)
            for (name, value), average in zip(tensors.items(), averages, strict=True)
        }

    def saved(self) -> dict[str, Tensor]:
        """Return this replica's own state, if it may differ from that of the others."""
        if not self.has_local_state:
            return {}
        weights = self.local_weights()
        named = {_outward(name): value for name, value in self.replica.moments().items()}
        named |= weights
        if self.anchor:
            named[self._counts] = torch.tensor([self.samples, self.steps])
        return {f"replica/{self.collectives.place}/{name}": value for name, value in named.items()}

    def local_weights(self) -> dict[str, Tensor]:
        """Return weights and buffers that only this replica has, by their names when saved."""
        return self.replica.weights() if self.differ else {}

    @property
    def anchor(self) -> str:
        """The name of a tensor of this stage."""
        return next(iter({**self.replica.parameters, **self.replica.statistics}), "")

    @property
    def _counts(self) -> str:
        """The name of the counts, which differs from that of a stage with other tensors."""
        names = (*self.replica.parameters, *self.replica.statistics)
        return f"{COUNTS}{zlib.crc32(' '.join(names).encode()):08x}/{self.anchor}"

    def wanted(self, shapes: Shapes) -> frozenset[str]:
        """Return the state of the replica at this place, if there were as many replicas."""
        size, place = self.collectives.size, self.collectives.place
        last, next_ = (f"replica/{i}/{self._counts}" for i in (size - 1, size))
        if last not in shapes or next_ in shapes:
            return frozenset()
        names = {*self.replica.parameters, *self.replica.statistics, *self.replica.states.find()}
        prefix = f"replica/{place}/"
        # With the counts of the last replica: what is wanted from the result is the same again.
        return frozenset(
            name
            for name in shapes
            if (name.startswith(prefix) and name.rpartition("/")[2] in names) or name == last
        )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue as the replica that saved this state."""
        prefix = f"replica/{self.collectives.place}/"
        state = {
            name.removeprefix(prefix): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }
        self.has_local_state = bool(state)
        counts = state.pop(self._counts, None)
        samples, self.steps = counts.tolist() if counts is not None else (0, 0)
        self.samples_before = self.trained.samples - samples
        self.differ = self.steps > 0
        self.put({_inward(name): value for name, value in state.items()})

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Load weights and optimizer state of this replica, by the names of a checkpoint."""
        self.replica.load(tensors)


def _outward(name: str) -> str:
    """Return optimizer/KEY/NAME for optimizer/NAME/KEY: saved names end in a parameter's name."""
    kind, rest = name.split("/", 1)
    parameter, _, key = rest.rpartition("/")
    return f"{kind}/{key}/{parameter}"


def _inward(name: str) -> str:
    """Return optimizer/NAME/KEY for optimizer/KEY/NAME; other names as they are."""
    if not name.startswith("optimizer/"):
        return name
    kind, key, parameter = name.split("/", 2)
    return f"{kind}/{parameter}/{key}"


@dataclass(frozen=True)
class Averages:
    """Averages and sums over the replicas, the same bits on all of them.

    Attributes:
        averages: weighted, in the order and the shapes of the tensors.
        sums: of the tensors that are summed.
        weights: [replicas], of each replica.
    """

    averages: list[Tensor]
    sums: list[Tensor]
    weights: Tensor

    @property
    def first(self) -> int:
        """The place of the first replica with samples."""
        return int(self.weights.nonzero()[0])


@torch.no_grad()
def weighted_average(
    collectives: Collectives,
    name: str,
    tensors: Sequence[Tensor],
    weight: float,
    summed: Sequence[Tensor] = (),
) -> Averages:
    """Average `tensors` over the replicas, and sum `summed`. Collective.

    Values travel in the logical order of each tensor, because the memory format of a tensor may
    differ between replicas. The results are views of one flat tensor.

    Args:
        weight: of this replica, such as its number of samples; positive on some replica.
    """
    values, size = [*tensors, *summed], collectives.size
    dtypes = [value.dtype for value in values] or [torch.float32]
    numbers, device = [value.numel() for value in values], values[0].device if values else None
    flat = torch.zeros(
        sum(numbers) + size, dtype=reduce(torch.promote_types, dtypes), device=device
    )
    pieces = [
        piece.view(value.shape)
        for piece, value in zip(flat[:-size].split(numbers), values, strict=True)
    ]
    for value, piece in zip(values, pieces, strict=True):
        piece.copy_(value)
    averaged, weights = flat[: sum(numbers[: len(tensors)])], flat[-size:]
    averaged *= weight
    weights[collectives.place] = weight
    collectives.wait(collectives.all_reduce(flat, name))
    averaged /= weights.sum()
    return Averages(pieces[: len(tensors)], pieces[len(tensors) :], weights)
