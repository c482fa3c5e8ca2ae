"""Averages of the changes that replicas have made since they last agreed, exact or compressed.

Weights that travel compressed would lose what is left out of them. A change does not: after a
meeting all replicas continue from the same weights, and what a replica has not sent of its change
is only in its residual, which it adds to its next change (see `residuals`). Changes are weighted
by the replica's share of the samples of all replicas since they last agreed, so that the sum of
all residuals is what the weights have not received yet, however long the periods are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from hvdtrain.options.syncrequest import CompressRequest
from hvdtrain.sync.average import Agreed, Averager
from hvdtrain.sync.compress import make_sums
from hvdtrain.sync.gradients import Bucket
from hvdtrain.sync.local import Trained
from hvdtrain.sync.meetings import NoMeetings
from hvdtrain.sync.residuals import RESIDUAL, STEPS, CompressedSums, named_views
from hvdtrain.sync.saved import Kept, Shapes

CHANGES, SAMPLES = "changes/", "samples/"


class Changes(Kept, Protocol):
    """The way in which changes of some parameters become their average over the replicas."""

    def start(self, changes: Sequence[Tensor], others: Sequence[Tensor], samples: int) -> Any:
        """Start to average the changes of all replicas, and other tensors as they are.

        Args:
            changes: of the parameters, in their order.
            samples: of this replica since the last start.
        """

    def finish(self, travelling: Any) -> Agreed:
        """Return averages of the changes and of the other tensors, in this order."""

    def count_step(self) -> None:
        """Count an update of the weights of all replicas."""
        return

    def residual_norm(self) -> float | None:
        """Return the norm of what this replica has not sent yet; None if it sends everything."""
        return None

    def period(self) -> frozenset[str]:
        """Return the names of what is saved for a resume with the same replicas only."""
        return frozenset()


MakeChanges: TypeAlias = Callable[[str, Mapping[str, nn.Parameter], Averager], Changes]


class ExactChanges(Changes):
    """Averages of changes that travel as they are, together with the other tensors.

    Args:
        name: of the operation.
        parameters: that change, by name.
    """

    def __init__(
        self, name: str, parameters: Mapping[str, nn.Parameter], averager: Averager
    ) -> None:
        self.name, self.averager = name, averager

    def start(self, changes: Sequence[Tensor], others: Sequence[Tensor], samples: int) -> Any:
        """Start one all-reduce."""
        return self.averager.start(self.name, [*changes, *others], samples)

    def finish(self, travelling: Any) -> Agreed:
        """Wait for it."""
        return self.averager.finish(travelling)


class CompressedChanges(Changes):
    """Averages of changes that travel compressed, with error feedback.

    The other tensors travel whole, beside them.

    Args:
        name: of the operations.
        parameters: that change, by name.
        averager: of the other tensors.
        sums: of the weighted changes; what they call steps are updates of the weights. They are
            this object's alone.
        trained: counts the samples of all replicas.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        averager: Averager,
        sums: CompressedSums,
        trained: Trained,
    ) -> None:
        self.name, self.names = name, list(parameters)
        self.averager, self.sums, self.trained = averager, sums, trained
        self.total_before = trained.total
        self.buckets = _buckets(f"{name}.changes", parameters)
        sums.attach(self.buckets)
        views: dict[str, Tensor] = {}
        for bucket in self.buckets:
            views |= named_views(bucket, bucket.flat)
        self.views = [views[parameter] for parameter in self.names]

    @torch.no_grad()
    def start(self, changes: Sequence[Tensor], others: Sequence[Tensor], samples: int) -> Any:
        """Start the compressed sums, and an all-reduce of the other tensors."""
        total, self.total_before = self.trained.total - self.total_before, self.trained.total
        travelling = self.averager.start(self.name, others, samples)
        for view, change in zip(self.views, changes, strict=True):
            torch.mul(change, samples / max(1, total), out=view)
        return travelling, [self.sums.start(bucket) for bucket in self.buckets]

    @torch.no_grad()
    def finish(self, travelling: Any) -> Agreed:
        """Wait for all of it; the averages of the changes are valid until the next start."""
        whole, handles = travelling
        agreed = self.averager.finish(whole)
        for bucket, handle in zip(self.buckets, handles, strict=True):
            self.sums.finish(bucket, handle)
        self.sums.settle()
        return Agreed([*self.views, *agreed.averages], agreed.sums, agreed.weights)

    def count_step(self) -> None:
        """Count a step: the first ones are exact."""
        self.sums.steps += 1

    def residual_norm(self) -> float:
        """Return the norm of this replica's residuals."""
        return self.sums.residual_norm()

    def period(self) -> frozenset[str]:
        """Return the name of the samples of the period."""
        return frozenset({self._samples})

    def saved(self) -> dict[str, Tensor]:
        """Return what the sums keep; the first replica adds the samples of the period."""
        kept = {f"{CHANGES}{name}": value for name, value in self.sums.saved().items()}
        if self.names and not self.averager.collectives.place:
            kept[self._samples] = torch.tensor(self.trained.total - self.total_before)
        return kept

    def wanted(self, shapes: Shapes) -> frozenset[str]:
        """Return what the sums read."""
        names = self.sums.wanted(_without_prefix(shapes))
        return frozenset(f"{CHANGES}{name}" for name in names)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with residuals and steps, and in the same period if its samples are there."""
        self.sums.load(_without_prefix(tensors))
        self.total_before = self.trained.total - int(tensors.get(self._samples, 0))

    @property
    def _samples(self) -> str:
        return f"{CHANGES}{SAMPLES}{next(iter(self.names), '')}"


class LeftOver(NoMeetings):
    """A single replica, which adds once what several replicas had not sent when they were saved.

    Args:
        parameters: by name.
        sign: of a change of weights in what travels: -1 if that is a gradient.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], sign: float = 1.0) -> None:
        self.parameters, self.sign = parameters, sign
        self.left_over: dict[str, Tensor] = {}
        self.steps = 0

    @override
    def before_step(self, epoch: int) -> None:
        """Add what is left over before the first step."""
        self.add()

    @torch.no_grad()
    def add(self) -> None:
        """Add to the weights what is left over."""
        for name, value in self.left_over.items():
            parameter = self.parameters[name]
            parameter.add_(value.to(parameter), alpha=self.sign)
        self.left_over = {}

    @override
    def after_step(self, step: int) -> None:
        """Count a step."""
        self.steps += 1

    @override
    def saved(self) -> dict[str, Tensor]:
        """Return the number of steps, and what is left over until the first step."""
        anchor = next(iter(self.parameters), None)
        kept = {f"{CHANGES}{RESIDUAL}0/{name}": value for name, value in self.left_over.items()}
        steps = {f"{CHANGES}{STEPS}{anchor}": torch.tensor(self.steps)} if anchor else {}
        return {**kept, **steps}

    @override
    def wanted(self, shapes: Shapes) -> frozenset[str]:
        """Return the residuals of all replicas, and the numbers of steps."""
        return frozenset(
            name
            for name in shapes
            if name.startswith(f"{CHANGES}{STEPS}")
            or (
                name.startswith(f"{CHANGES}{RESIDUAL}")
                and name.rpartition("/")[2] in self.parameters
            )
        )

    @override
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Add up the residuals of each parameter."""
        self.left_over, self.steps = {}, 0
        for key, value in sorted(tensors.items()):
            name = key.rpartition("/")[2]
            if key.startswith(f"{CHANGES}{RESIDUAL}"):
                before = self.left_over.get(name)
                self.left_over[name] = value.clone() if before is None else before + value
            else:
                self.steps = max(self.steps, int(value))


def compressed(request: CompressRequest, after: int, trained: Trained) -> MakeChanges:
    """Return what makes averages of changes that travel as a value of `--compress` requests.

    Args:
        request: not that of no compression.
        after: first updates of the weights; a meeting after one of them is exact.
        trained: counts the samples of all replicas.
    """

    def make(name: str, parameters: Mapping[str, nn.Parameter], averager: Averager) -> Changes:
        # An update is counted before the meeting that follows it.
        sums = make_sums(request, after + 1, averager.collectives)
        assert isinstance(sums, CompressedSums), request
        return CompressedChanges(name, parameters, averager, sums, trained)

    return make


def total_norm(changes: Iterable[Changes]) -> dict[str, float]:
    """Return the norm of all residuals by its name in the counts; nothing if there are none."""
    norms = [norm for one in changes if (norm := one.residual_norm()) is not None]
    return {"residual_norm": sum(norm**2 for norm in norms) ** 0.5} if norms else {}


def _buckets(name: str, parameters: Mapping[str, nn.Parameter]) -> list[Bucket]:
    """Return a bucket per dtype and device, which is not the gradient of the parameters."""
    groups: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for key, value in parameters.items():
        groups.setdefault((value.dtype, value.device), {})[key] = value
    return [
        Bucket(
            f"{name}{number}",
            torch.zeros(
                sum(value.numel() for value in group.values()), dtype=dtype, device=device
            ),
            list(group),
            list(group.values()),
        )
        for number, ((dtype, device), group) in enumerate(groups.items())
    ]


def _without_prefix(named: Mapping[str, Any]) -> dict[str, Any]:
    return {k.removeprefix(CHANGES): v for k, v in named.items() if k.startswith(CHANGES)}
