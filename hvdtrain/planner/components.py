"""What each component of a model takes on each rank, as a profile holds it; no torch here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.planner.curve import Curve, stacked


@dataclass(frozen=True)
class ComponentTimes:
    """Seconds of one component on one rank, by the samples it is given.

    Attributes:
        input_half, weight_half: of a backward in halves; None where they were not measured.
        update: the optimizer's, whatever the samples.
        spread: of the measured repeats, (largest - smallest) / median of the noisiest size.
    """

    forward: Curve
    backward: Curve
    input_half: Curve | None = None
    weight_half: Curve | None = None
    update: float = 0.0
    spread: float = 0.0

    def times(self, factor: float) -> "ComponentTimes":
        """On a rank that is so many times as slow."""
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
        """As it stands in a profile's file."""
        curves = {
            name: [list(point) for point in curve.points]
            for name in ("forward", "backward", "input_half", "weight_half")
            if (curve := getattr(self, name)) is not None
        }
        return curves | {"update": self.update, "spread": self.spread}


class Each(NamedTuple):
    """Seconds of all components of a rank, in their order: fp64 [components].

    Attributes:
        forward, backward: of so many samples.
    """

    forward: Callable[[float], np.ndarray]
    backward: Callable[[float], np.ndarray]
    update: np.ndarray


NOTHING = Curve(((1.0, 0.0),))


@dataclass(frozen=True)
class RankTimes:
    """What one rank takes.

    Attributes:
        components: by name.
        load: seconds of making images ready for the first component, by samples.
        resident_bytes: of the process besides what is counted of a model.
        activation_factor: how many times as much activations take as is counted of them.
        message_seconds: of posting a receipt, sending next to nothing and taking it in, besides
            what is between ranks.
    """

    components: Mapping[str, ComponentTimes]
    load: Curve = NOTHING
    resident_bytes: int = 0
    message_seconds: float = 0.0
    activation_factor: float = 1.0

    @cached_property
    def each(self) -> "Each":
        """Of all components at once."""
        return Each(
            *(
                stacked([part.forward for part in self.components.values()]),
                stacked([part.backward for part in self.components.values()]),
            ),
            np.array([part.update for part in self.components.values()]),
        )

    def times(self, factor: float) -> "RankTimes":
        """On a rank that is so many times as slow."""
        slower = {name: each.times(factor) for name, each in self.components.items()}
        return replace(
            self,
            components=slower,
            load=self.load.times(factor),
            message_seconds=factor * self.message_seconds,
        )


@dataclass(frozen=True)
class Profile:
    """What every rank takes.

    Attributes:
        ranks: in their order.
    """

    ranks: tuple[RankTimes, ...]

    @classmethod
    def alike(cls, one: RankTimes, ranks: int) -> "Profile":
        """So many ranks of one kind."""
        return cls((one,) * ranks)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The components, in the order of the model."""
        return tuple(self.ranks[0].components)

    @cached_property
    def slowness(self) -> tuple[float, ...]:
        """How many times as long as the fastest rank each one takes for the whole model.

        Of all measured sizes the median counts: a rank that was disturbed at one is not slow.
        """
        curve = next(iter(self.ranks[0].components.values())).forward
        sizes = [size for size, _ in curve.points if size > 0] or [1.0]
        seconds = np.maximum([_whole_model(rank, sizes) for rank in self.ranks], 1e-12)
        each: list[float] = np.median(seconds / seconds.min(axis=0), axis=1).tolist()
        return tuple(slow / min(each) for slow in each)

    def scaled(self, factors: Sequence[float]) -> "Profile":
        """With each rank so many times as slow as it was measured."""
        pairs = zip(self.ranks, factors, strict=True)
        return Profile(tuple(rank.times(factor) for rank, factor in pairs))


def _whole_model(rank: RankTimes, sizes: Sequence[float]) -> list[float]:
    """Seconds of all components together, for each size."""
    each = rank.each
    return [float((each.forward(size) + each.backward(size)).sum()) for size in sizes]
