"""Error feedback: what a compressed sum leaves out of a gradient is added to the next gradient.

Stich et al., "Sparsified SGD with Memory", 2018; Karimireddy et al., "Error Feedback Fixes SignSGD
and other Gradient Compression Schemes", 2019. A replica sends an approximation of g + e, its
gradient and its residual; the new residual is what it has not sent. Gradients are weighted by the
replica's share of the global batch, so that sums are means over the samples, and the sum of
all residuals is what the weights have not received yet.
"""

import abc
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.gradients import Bucket, ExactSums, Sums, laid_out
from hvdtrain.sync.states import Shapes

RESIDUAL, STEPS = "residual/", "compressed-steps/"


class Residual:
    """The part of the gradients of one bucket that a replica has not sent yet.

    Attributes:
        size: elements of the gradients, without the statistics that follow them.
        current: [size], what the next step adds to its gradients.
        following: [size], that of the step after it, which replaces `current` if the step counts.
            Until a bucket has been compressed it is the gradient with `current` added.
        is_pending: whether `following` belongs to a step that does not count yet.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.size = sum(parameter.numel() for parameter in bucket.parameters)
        self.current = torch.zeros_like(bucket.flat[: self.size])
        self.following = torch.zeros_like(self.current)
        self.is_pending = False

    @property
    def gradients(self) -> Tensor:
        """The gradients of the bucket [size]."""
        return self.bucket.flat[: self.size]

    @property
    def tail(self) -> Tensor:
        """The statistics of the bucket, which always travel as they are."""
        return self.bucket.flat[self.size :]

    def start(self) -> Tensor:
        """Return `following` with what should be sent: the gradients with `current` added."""
        self.is_pending = True
        return torch.add(self.gradients, self.current, out=self.following)

    def after_update(self) -> None:
        """Continue with the residual of the last step."""
        if self.is_pending:
            self.current, self.following = self.following, self.current
            self.is_pending = False

    def by_name(self) -> dict[str, Tensor]:
        """Return `current` by parameter, each a view with the shape of the parameter."""
        views, offset = {}, int(self.current.storage_offset())
        for name, parameter in zip(self.bucket.names, self.bucket.parameters, strict=True):
            views[name] = laid_out(self.current, parameter, offset)
            offset += parameter.numel()
        return views


class CompressedSums(Sums, abc.ABC):
    """Approximate sums of buckets with error feedback, after some exact steps.

    Checkpoints hold the residual of each replica and parameter, and the number of steps. On
    another number of replicas the first one continues with the sum of all residuals, since the
    weights receive no more than their sum.

    Args:
        collectives: among the replicas.
        after: first steps, whose sums are exact. Steps that do not count, such as one with bad
            gradients, are not among them.

    Attributes:
        parts: ends of the names of the operations that sum a bucket.
    """

    parts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, collectives: Collectives, after: int = 0) -> None:
        self.collectives, self.after, self.steps = collectives, after, 0
        self.exact = ExactSums(collectives)
        self.residuals: dict[str, Residual] = {}

    @abc.abstractmethod
    def send(self, residual: Residual, full: Tensor) -> Any:
        """Start to sum the approximation of `full`; return what `receive` needs.

        Args:
            full: `residual.following`, to which other calls may not refer.
        """

    @abc.abstractmethod
    def receive(self, residual: Residual, handle: Any) -> None:
        """Store the sum in the bucket, and in `residual.following` what was not sent."""

    def attach(self, buckets: Sequence[Bucket]) -> None:
        """Allocate a residual per bucket."""
        names = [f"{bucket.name}.{part}" for bucket in buckets for part in self.parts]
        self.collectives.prepare(names)
        self.residuals = {bucket.name: Residual(bucket) for bucket in buckets}

    def start(self, bucket: Bucket) -> Any:
        """Start the sum of a bucket."""
        if self.steps < self.after:
            return self.exact.start(bucket)
        residual = self.residuals[bucket.name]
        full = residual.start()
        return self.send(residual, full) if len(full) else self.exact.start(bucket)

    def finish(self, bucket: Bucket, handle: Any) -> None:
        """Wait for the sum, and compute the residual."""
        residual = self.residuals[bucket.name]
        if residual.is_pending and residual.size:
            self.receive(residual, handle)
        else:
            self.exact.finish(bucket, handle)

    def after_update(self) -> None:
        """Count the step, and continue with its residuals."""
        self.steps += 1
        for residual in self.residuals.values():
            residual.after_update()

    def counted(self) -> Mapping[str, float]:
        """Return the bytes that this rank has sent, and the norm of its current residuals."""
        norms = [residual.current.norm().double().cpu() for residual in self.residuals.values()]
        norm = float(torch.stack(norms).norm()) if norms else 0.0
        return {**self.exact.counted(), "residual_norm": norm}

    def saved(self) -> dict[str, Tensor]:
        """Return this replica's residuals, and on the first one the number of steps."""
        place = self.collectives.place
        residuals = {
            f"{RESIDUAL}{place}/{name}": value
            for residual in self.residuals.values()
            for name, value in residual.by_name().items()
        }
        names = self._names()
        steps = {f"{STEPS}{names[0]}": torch.tensor(self.steps)} if names and not place else {}
        return {**residuals, **steps}

    def wanted(self, shapes: Shapes) -> frozenset[str]:
        """Return the names of the residuals to add up, and of all numbers of steps.

        A stage of another plan may have another first parameter.
        """
        places, names = _places(shapes), set(self._names())
        residuals = {
            f"{RESIDUAL}{place}/{name}"
            for name in names & places.keys()
            for place in self._places_to_load(places[name])
        }
        return frozenset(residuals).union(name for name in shapes if name.startswith(STEPS))

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with the sum of the loaded residuals of each parameter."""
        self.steps = max(
            (int(value) for name, value in tensors.items() if name.startswith(STEPS)), default=0
        )
        places = _places(tensors)
        for residual in self.residuals.values():
            residual.is_pending = False
            for name, view in residual.by_name().items():
                view.zero_()
                for place in places[name]:
                    view.add_(tensors[f"{RESIDUAL}{place}/{name}"].to(view.device))

    def _names(self) -> list[str]:
        return [name for residual in self.residuals.values() for name in residual.bucket.names]

    def _places_to_load(self, places: Sequence[int]) -> Sequence[int]:
        if len(places) == self.collectives.size:
            return [self.collectives.place]
        return places if self.collectives.place == 0 else []


def _places(named: Mapping[str, object]) -> defaultdict[str, list[int]]:
    """Return by parameter the places of the replicas whose residuals there are, in order."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    for key in named:
        if key.startswith(RESIDUAL):
            place, name = key.removeprefix(RESIDUAL).split("/", 1)
            places[name].append(int(place))
    return defaultdict(list, {name: sorted(numbers) for name, numbers in places.items()})
