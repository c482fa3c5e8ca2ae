"""Profiles: the times of each component on each rank.

A profile is measured (`measure.py`), read from a file (`profilefile.py`), or predicted
(`clusters.py`). This module does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.planner.agreement import Coding
from hvdtrain.planner.network import Curve, Stacked

HALVES = ("input_half", "weight_half")


@dataclass(frozen=True)
class ComponentTimes:
    """Seconds of one component on one rank, by number of samples.

    Attributes:
        input_half, weight_half: of a backward in halves; None if they were not measured.
        update: of the optimizer; does not depend on the samples.
        spread: of the repeats that count, (largest - smallest) / median of the noisiest size.
        coding: of compressing and decompressing its gradients, by the measured methods.
        contention: how much slower its backward is while an all-reduce is in flight, at least 1;
            None if it was not measured: then that of the network counts.
    """

    forward: Curve
    backward: Curve
    input_half: Curve | None = None
    weight_half: Curve | None = None
    update: float = 0.0
    spread: float = 0.0
    coding: Mapping[str, Coding] = field(default_factory=dict)
    contention: float | None = None

    def times(self, factor: float) -> "ComponentTimes":
        """Return the times on a rank that is `factor` times slower."""
        input_half, weight_half = (
            None if half is None else half.times(factor)
            for half in (self.input_half, self.weight_half)
        )
        return ComponentTimes(
            forward=self.forward.times(factor),
            backward=self.backward.times(factor),
            input_half=input_half,
            weight_half=weight_half,
            update=factor * self.update,
            spread=self.spread,
            coding={method: code.times(factor) for method, code in self.coding.items()},
            contention=self.contention,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the times as a profile file stores them."""
        curves = {
            name: curve.as_lists()
            for name in ("forward", "backward", *HALVES)
            if (curve := getattr(self, name)) is not None
        }
        coding = {method: list(code) for method, code in self.coding.items()}
        measured = {} if self.contention is None else {"contention": self.contention}
        return curves | measured | {"update": self.update, "spread": self.spread, "coding": coding}


class ComponentArrays(NamedTuple):
    """Seconds of all components of a rank, in model order: fp64 [components].

    Attributes:
        forward, backward: called with a number of samples, they return the array.
        update: of the optimizer.
        contention: slowdown of the backward while an all-reduce is in flight; NaN where it was not
            measured.
    """

    forward: Stacked
    backward: Stacked
    update: np.ndarray
    contention: np.ndarray


NOTHING = Curve(((1.0, 0.0),))


@dataclass(frozen=True)
class RankTimes:
    """Measured or predicted times of one rank.

    Attributes:
        components: times by component name.
        load: seconds of preparing images for the first component, by number of samples.
        resident_bytes: bytes of the process besides those counted for a model.
        activation_factor: real bytes of activations divided by the counted ones.
        activation_spread: by how much this factor was larger at another number of samples.
        message_seconds: seconds of posting a receive, sending one byte and receiving it, besides
            the time of the network.
    """

    components: Mapping[str, ComponentTimes]
    load: Curve = NOTHING
    resident_bytes: int = 0
    message_seconds: float = 0.0
    activation_factor: float = 1.0
    activation_spread: float = 0.0

    @cached_property
    def arrays(self) -> ComponentArrays:
        """Return the times of all components as arrays."""
        times = self.components.values()
        return ComponentArrays(
            forward=Stacked([part.forward for part in times]),
            backward=Stacked([part.backward for part in times]),
            update=np.array([part.update for part in times]),
            contention=np.array([part.contention or np.nan for part in times]),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the times as a profile file stores them."""
        return {
            "components": {name: times.to_json() for name, times in self.components.items()},
            "load": self.load.as_lists(),
            "resident_bytes": self.resident_bytes,
            "message_seconds": self.message_seconds,
            "activation_factor": self.activation_factor,
            "activation_spread": self.activation_spread,
        }

    def with_coding(self, coding: Mapping[str, Mapping[str, Coding]]) -> "RankTimes":
        """Return the times with the seconds of compression, by component and method."""
        components = {
            name: replace(times, coding=coding[name]) for name, times in self.components.items()
        }
        return replace(self, components=components)

    def times(self, factor: float) -> "RankTimes":
        """Return the times on a rank that is `factor` times slower."""
        slower = {name: component.times(factor) for name, component in self.components.items()}
        return replace(
            self,
            components=slower,
            load=self.load.times(factor),
            message_seconds=factor * self.message_seconds,
        )


@dataclass(frozen=True)
class Profile:
    """Times of all ranks.

    Attributes:
        ranks: in rank order.
    """

    ranks: tuple[RankTimes, ...]

    @classmethod
    def alike(cls, one: RankTimes, ranks: int) -> "Profile":
        """Return a profile of `ranks` ranks with the same times."""
        return cls((one,) * ranks)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of the components, in model order."""
        return tuple(self.ranks[0].components)

    @cached_property
    def slowness(self) -> tuple[float, ...]:
        """Return the time of each rank for the whole model, divided by that of the fastest rank.

        It is the median over all measured sizes, so that a disturbance at one size does not count.
        """
        curve = next(iter(self.ranks[0].components.values())).forward
        sizes = [size for size, _ in curve.points if size > 0] or [1.0]
        seconds = np.maximum([_whole_model(rank, sizes) for rank in self.ranks], 1e-12)
        ratios: list[float] = np.median(seconds / seconds.min(axis=0), axis=1).tolist()
        return tuple(slow / min(ratios) for slow in ratios)

    def with_coding(self, coding: Mapping[str, Mapping[str, Coding]]) -> "Profile":
        """Return the profile with the same seconds of compression on all ranks.

        Args:
            coding: by component and method.
        """
        alike = {id(rank): rank.with_coding(coding) for rank in self.ranks}
        return Profile(tuple(alike[id(rank)] for rank in self.ranks))

    def with_margin(self) -> "Profile":
        """Return the profile with the memory of the rank that needed most, on all ranks.

        All ranks run the same program, so a difference between their measurements is chance.
        Activations count with the larger of two measured factors.
        """
        resident = max(rank.resident_bytes for rank in self.ranks)
        factor = max(rank.activation_factor + rank.activation_spread for rank in self.ranks)
        changed = {
            id(rank): replace(
                rank, resident_bytes=resident, activation_factor=factor, activation_spread=0.0
            )
            for rank in self.ranks
        }
        return Profile(tuple(changed[id(rank)] for rank in self.ranks))

    def scaled(self, factors: Sequence[float]) -> "Profile":
        """Return the profile with each rank slower by its factor."""
        pairs = zip(self.ranks, factors, strict=True)
        return Profile(tuple(rank.times(factor) for rank, factor in pairs))


def _whole_model(rank: RankTimes, sizes: Sequence[float]) -> list[float]:
    """Return the seconds of all components together, for each size."""
    arrays = rank.arrays
    return [float((arrays.forward(size) + arrays.backward(size)).sum()) for size in sizes]
