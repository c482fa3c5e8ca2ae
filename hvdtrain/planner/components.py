"""What each component of a model takes on each rank, as a profile holds it; no torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hvdtrain.planner.curve import Curve


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


NOTHING = Curve(((1.0, 0.0),))


@dataclass(frozen=True)
class RankTimes:
    """What one rank takes.

    Attributes:
        components: by name.
        load: seconds of making images ready for the first component, by samples.
        resident_bytes: of the process before a model is built.
    """

    components: Mapping[str, ComponentTimes]
    load: Curve = NOTHING
    resident_bytes: int = 0

    def times(self, factor: float) -> "RankTimes":
        """On a rank that is so many times as slow."""
        slower = {name: each.times(factor) for name, each in self.components.items()}
        return RankTimes(slower, self.load.times(factor), self.resident_bytes)


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
        """How many times as long as the fastest rank each one takes for the whole model."""
        seconds = [max(_whole_model(rank), 1e-12) for rank in self.ranks]
        return tuple(each / min(seconds) for each in seconds)

    def scaled(self, factors: Sequence[float]) -> "Profile":
        """With each rank so many times as slow as it was measured."""
        pairs = zip(self.ranks, factors, strict=True)
        return Profile(tuple(rank.times(factor) for rank, factor in pairs))


def _whole_model(rank: RankTimes) -> float:
    largest = [
        each.forward.points[-1][1] + each.backward.points[-1][1]
        for each in rank.components.values()
    ]
    return sum(largest)
