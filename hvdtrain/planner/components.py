"""Holds the times of each component on each rank, as in a profile; does not import torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.planner.network import Curve, stacked


@dataclass(frozen=True)
class ComponentTimes:
    """Seconds of one component on one rank, by number of samples.

    Attributes:
        input_half, weight_half: of a backward in halves; None if they were not measured.
        update: of the optimizer; does not depend on the samples.
        spread: of the measured repeats, (largest - smallest) / median of the noisiest size.
    """

    forward: Curve
    backward: Curve
    input_half: Curve | None = None
    weight_half: Curve | None = None
    update: float = 0.0
    spread: float = 0.0

    def times(self, factor: float) -> "ComponentTimes":
        """Return the times on a rank that is `factor` times slower."""
        input_half, weight_half = (
            None if half is None else half.times(factor)
            for half in (self.input_half, self.weight_half)
        )
        return ComponentTimes(
            *(self.forward.times(factor), self.backward.times(factor), input_half, weight_half),
            factor * self.update,
            self.spread,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the times as a profile file stores them."""
        curves = {
            name: [list(point) for point in curve.points]
            for name in ("forward", "backward", "input_half", "weight_half")
            if (curve := getattr(self, name)) is not None
        }
        return curves | {"update": self.update, "spread": self.spread}


class ComponentArrays(NamedTuple):
    """Seconds of all components of a rank, in model order: fp64 [components].

    Attributes:
        forward, backward: return the array for a number of samples.
        update: of the optimizer.
    """

    forward: Callable[[float], np.ndarray]
    backward: Callable[[float], np.ndarray]
    update: np.ndarray


NOTHING = Curve(((1.0, 0.0),))


@dataclass(frozen=True)
class RankTimes:
    """Measured or predicted times of one rank.

    Attributes:
        components: times by component name.
        load: seconds of preparing images for the first component, by number of samples.
        resident_bytes: bytes of the process besides those counted for a model.
        activation_factor: real bytes of activations divided by the counted ones.
        message_seconds: seconds of posting a receive, sending one byte and receiving it, besides
            the time of the network.
    """

    components: Mapping[str, ComponentTimes]
    load: Curve = NOTHING
    resident_bytes: int = 0
    message_seconds: float = 0.0
    activation_factor: float = 1.0

    @cached_property
    def arrays(self) -> ComponentArrays:
        """Return the times of all components as arrays."""
        return ComponentArrays(
            *(
                stacked([part.forward for part in self.components.values()]),
                stacked([part.backward for part in self.components.values()]),
            ),
            np.array([part.update for part in self.components.values()]),
        )

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

    def scaled(self, factors: Sequence[float]) -> "Profile":
        """Return the profile with each rank slower by its factor."""
        pairs = zip(self.ranks, factors, strict=True)
        return Profile(tuple(rank.times(factor) for rank, factor in pairs))


def _whole_model(rank: RankTimes, sizes: Sequence[float]) -> list[float]:
    """Return the seconds of all components together, for each size."""
    arrays = rank.arrays
    return [float((arrays.forward(size) + arrays.backward(size)).sum()) for size in sizes]
