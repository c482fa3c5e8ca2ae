"""Seconds of transfers and all-reduces between ranks, measured or assumed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from hvdtrain.planner.curve import Curve


class Contention(NamedTuple):
    """Slowdown of computing and of an all-reduce when both run at the same time, at least 1.

    Galvatron (Miao et al., VLDB 2023) reports that predictions are off by 15 % without it.
    """

    compute: float = 1.0
    reduce: float = 1.0


FREE = Contention()


class Network(Protocol):
    """Interface of a network for predictions."""

    @property
    def contention(self) -> Contention:
        """Return the slowdown of computing and all-reduces that run at the same time."""

    @property
    def hosts(self) -> Sequence[str]:
        """Return the host of each rank."""

    @property
    def breakpoints(self) -> Sequence[float]:
        """Return the sizes in bytes between which the seconds of all operations are linear."""

    def reduce_seconds(self, ranks: Sequence[int], size: float) -> float:
        """Return the seconds of an all-reduce of `size` bytes over `ranks`."""

    def send_seconds(self, sender: int, receiver: int, size: float) -> float:
        """Return the seconds from a send of `size` bytes to their arrival."""


@dataclass(frozen=True)
class MeasuredNetwork:
    """A network that was measured on the ranks of a job.

    Attributes:
        hosts: the host of each rank.
        all_reduce: seconds by bytes, by number of ranks; the first key is whether they are on
            several hosts.
        hand_over: seconds by bytes; the key is whether the two ranks are on different hosts.
    """

    hosts: tuple[str, ...]
    all_reduce: dict[bool, dict[int, Curve]] = field(default_factory=dict)
    hand_over: dict[bool, Curve] = field(default_factory=dict)
    contention: Contention = FREE

    def scaled(self, factor: float) -> "MeasuredNetwork":
        """Return a network that is `factor` times slower."""
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
        """Return all measured sizes, ascending."""
        curves = [curve for curves in self.all_reduce.values() for curve in curves.values()]
        curves += self.hand_over.values()
        return sorted({size for curve in curves for size, _ in curve.points})

    def reduce_seconds(self, ranks: Sequence[int], size: float) -> float:
        """Return the seconds of an all-reduce, interpolated between measured numbers of ranks."""
        if len(ranks) < 2 or not size:
            return 0.0
        crosses = len({self.hosts[rank] for rank in ranks}) > 1
        by_number = self.all_reduce.get(crosses) or self.all_reduce[not crosses]
        numbers = sorted(by_number)
        seconds = [by_number[number](size) for number in numbers]
        if len(numbers) == 1:
            return seconds[0]
        return Curve(tuple(zip(map(float, numbers), seconds, strict=True)))(len(ranks))

    def send_seconds(self, sender: int, receiver: int, size: float) -> float:
        """Return the seconds from a send of `size` bytes to their arrival."""
        if sender == receiver:
            return 0.0
        crosses = self.hosts[sender] != self.hosts[receiver]
        return (self.hand_over.get(crosses) or self.hand_over[not crosses])(size)


@dataclass(frozen=True)
class FreeNetwork:
    """A network that takes no time."""

    hosts: Sequence[str]
    contention: Contention = FREE
    breakpoints: Sequence[float] = ()

    def reduce_seconds(self, ranks: Sequence[int], size: float) -> float:
        """Return 0."""
        return 0.0

    def send_seconds(self, sender: int, receiver: int, size: float) -> float:
        """Return 0."""
        return 0.0
