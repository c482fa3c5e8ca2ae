"""Replicas that take local steps: their state, their periods, and how they are averaged."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn
from typing_extensions import override

from hvdtrain.options.requests import DiLoCo, Elastic, Local
from hvdtrain.plan.cut import Share
from hvdtrain.plan.trace import Reduction
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.gradients import Gradients, SerialGradients
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


FORCE = 0.9  # the sum of the rates of all replicas, in the paper's experiments


class LocalGradients(SerialGradients):
    """The gradients of one of several replicas, over its own samples only.

    The loss is divided by the samples of the whole batch: the gradients are scaled to the mean
    over this replica's samples. Without samples there are no gradients, and the optimizer changes
    neither weights nor its state.

    Args:
        parameters: the stage's parameters by name.
        trained: counts the samples.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], trained: SampleCount) -> None:
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

    def updated(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters."""
        return self.local.updated()

    def after_update(self) -> None:
        """Count the step."""
        self.current.after_update()

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
        gradients: exact at first; None: local from the start.
    """

    request: Local

    def __init__(
        self,
        replica: Replica,
        collectives: Collectives,
        trained: SampleCount,
        request: Local,
        gradients: SwitchedGradients | None = None,
    ) -> None:
        super().__init__(replica, collectives, trained, request)
        self.gradients, self.is_exact = gradients, gradients is not None

    @override
    def before_step(self, epoch: int) -> None:
        """Make the gradients local in the first step after the exact epochs."""
        self.is_exact = epoch < self.request.exact_epochs
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
        if self.request.averages_optimizer:
            tensors += self.replica.moments().values()
        agreed = weighted_average(self.collectives, "meeting", tensors, self.samples)
        self.measure_drift(agreed.averages[: len(parameters)])
        for tensor, average in zip(tensors, agreed.averages, strict=True):
            tensor.copy_(average)
        self.copy_states(agreed.first)
        self.differ, self.has_local_state = False, not self.request.averages_optimizer
        self.end_period()


class DiLoCoMeetings(Apart):
    """Meetings with an outer optimizer, which follows the average of the replicas' changes.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv
    2311.08105. The outer gradient is the start of the period minus the average of the replicas;
    SGD with Nesterov momentum updates the start with it, and all replicas continue from there.

    Attributes:
        start: the parameters after the last meeting, the same on all replicas; empty before the
            first step.
        momentum: of the outer optimizer, per parameter.
    """

    request: DiLoCo
    start: Sequence[Tensor] = ()
    momentum: Sequence[Tensor] = ()

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
        agreed = weighted_average(self.collectives, "meeting", [*changes, *buffers], self.samples)
        gradients = agreed.averages[: len(changes)]
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        self.drift = float(torch.stack(norms).square().sum().sqrt()) if norms else 0.0
        for start, momentum, gradient in zip(self.start, self.momentum, gradients, strict=True):
            momentum.mul_(self.request.momentum).add_(gradient)
            step = gradient.add(momentum, alpha=self.request.momentum)
            start.sub_(step, alpha=self.request.lr)
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
        self.start = self._loaded(tensors, "start")
        self.momentum = self._loaded(tensors, "momentum")
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


class ElasticMeetings(Apart):
    """Meetings of replicas that are drawn to a common centre.

    Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015: after
    every period x_i <- x_i - a (x_i - c) and c <- c + a sum_i (x_i - c), with the centre c before
    the meeting in both. All replicas hold the centre, and an all-reduce sums the distances.

    The result of the method is the centre: evaluations and checkpoints see it. Before the next
    step each replica takes its own weights back. Running statistics have no centre: replicas
    average them.

    Attributes:
        centre: by parameter; None before the first step, when it is equal to the weights.
        local: this replica's parameters while the model holds the centre, else None.
    """

    request: Elastic
    centre: dict[str, Tensor] | None = None
    local: dict[str, Tensor] | None = None

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
        rate = self.request.rate
        rate = FORCE / self.collectives.size if rate is None else rate
        agreed = weighted_average(
            self.collectives, "meeting", list(statistics), self.samples, distances
        )
        for parameter, distance in zip(parameters.values(), distances, strict=True):
            parameter.sub_(distance, alpha=rate)
        for centre, total in zip(self.centre.values(), agreed.sums, strict=True):
            centre.add_(total, alpha=rate)
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
    def averages(self) -> dict[str, Tensor]:
        """Return the centre, and the averages of all else, by name."""
        agreed = super().averages()
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
