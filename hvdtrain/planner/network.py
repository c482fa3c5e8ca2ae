"""What handing tensors on and summing gradients takes between ranks, as measured or as given."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from hvdtrain.planner.curve import Curve


class Contention(NamedTuple):
    """How many times as long computing and an all-reduce take beside each other as alone.

    Galvatron (Miao et al., VLDB 2023) found that without it predictions are off by 15 %.
    """

    compute: float = 1.0
    reduce: float = 1.0


FREE = Contention()


class Network(Protocol):
    """What a prediction asks of a network."""

    @property
    def contention(self) -> Contention:
        """Of computing and sums beside each other."""

    @property
    def hosts(self) -> Sequence[str]:
        """Of each rank."""

    @property
    def breakpoints(self) -> Sequence[float]:
        """Bytes between which the seconds of a sum, or a hand-over, lie on straight lines."""

    def reduce_seconds(self, ranks: Sequence[int], size: float) -> float:
        """Of a sum of `size` bytes over `ranks`."""

    def hand_over_seconds(self, sender: int, receiver: int, size: float) -> float:
        """From a send of `size` bytes to their arrival."""


@dataclass(frozen=True)
class MeasuredNetwork:
    """What was measured on the ranks of a job.

    Attributes:
        hosts: of each rank.
        all_reduce: seconds by bytes, of so many ranks: on one host, and of several.
        hand_over: seconds by bytes: on one host, and between two.
    """

    hosts: tuple[str, ...]
    all_reduce: dict[bool, dict[int, Curve]] = field(default_factory=dict)
    hand_over: dict[bool, Curve] = field(default_factory=dict)
    contention: Contention = FREE

    def scaled(self, factor: float) -> "MeasuredNetwork":
        """One that is so many times as slow."""
        return replace(
            self,
            all_reduce={
                crosses: {number: curve.times(factor) for number, curve in curves.items()}
                for crosses, curves in self.all_reduce.items()
            },
            hand_over={crosses: c.times(factor) for crosses, c in self.hand_over.items()},
        )

    @property
    def breakpoints(self) -> Sequence[float]:
        """As in `Network`."""
        curves = [curve for curves in self.all_reduce.values() for curve in curves.values()]
        curves += self.hand_over.values()
        return sorted({size for curve in curves for size, _ in curve.points})

    def reduce_seconds(self, ranks: Sequence[int], size: float) -> float:
        """As in `Network`; between two measured numbers of ranks, on the line between them."""
        if len(ranks) < 2 or not size:
            return 0.0
        crosses = len({self.hosts[rank] for rank in ranks}) > 1
        by_number = self.all_reduce.get(crosses) or self.all_reduce[not crosses]
        numbers = sorted(by_number)
        seconds = [by_number[number](size) for number in numbers]
        if len(numbers) == 1:
            return seconds[0]
        return Curve(tuple(zip(map(float, numbers), seconds, strict=True)))(len(ranks))

    def hand_over_seconds(self, sender: int, receiver: int, size: float) -> float:
        """As in `Network`."""
        if sender == receiver:
            return 0.0
        crosses = self.hosts[sender] != self.hosts[receiver]
        return (self.hand_over.get(crosses) or self.hand_over[not crosses])(size)


@dataclass(frozen=True)
class FreeNetwork:
    """One that takes no time."""

    hosts: Sequence[str]
    contention: Contention = FREE
    breakpoints: Sequence[float] = ()

    def reduce_seconds(self, ranks: Sequence[int], size: float) -> float:
        """As in `Network`."""
        return 0.0

    def hand_over_seconds(self, sender: int, receiver: int, size: float) -> float:
        """As in `Network`."""
        return 0.0
