"""Measurements of the study, arranged for its report, with the fits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

from hvdtrain.options.syncoptions import Library
from hvdtrain.planner.network import Line
from hvdtrain.study.collectives.arms import Arm
from hvdtrain.study.collectives.cells import LIBRARIES, SumCell
from hvdtrain.study.collectives.textbook import (
    Counts,
    Network,
    Seconds,
    counts,
    fitted_line,
    fitted_network,
    medians,
)
from hvdtrain.study.results import Result
from hvdtrain.study.statistics import Estimate, ratio
from hvdtrain.study.statistics import median as estimate

if TYPE_CHECKING:  # it loads torch
    from hvdtrain.study.collectives.predictions import Prediction


@dataclass(frozen=True)
class Sums:
    """The all-reduces of an algorithm in a group.

    Attributes:
        seconds: of the repeats, by bytes.
    """

    algorithm: str
    ranks: int
    seconds: Seconds

    @cached_property
    def medians(self) -> dict[int, float]:
        """Return the median seconds by bytes."""
        return medians(self.seconds)

    @cached_property
    def line(self) -> Line:
        """Return latency and seconds per byte, fitted to the medians."""
        return fitted_line(self.medians)

    @property
    def fitted(self) -> dict[int, float]:
        """Return the seconds of the line by bytes."""
        return {size: self.line.fixed + self.line.per_unit * size for size in self.medians}

    @property
    def counts(self) -> Counts | None:
        """Return what the textbook counts."""
        return counts(self.algorithm, self.ranks)

    def fit_of_repeats(self, part: Callable[[Line], float]) -> Estimate:
        """Return a part of the lines that are fitted to single repeats: median and interval."""
        repeats = len(next(iter(self.seconds.values())))
        lines = [
            fitted_line({size: values[k] for size, values in self.seconds.items()})
            for k in range(repeats)
        ]
        return estimate([part(line) for line in lines])


@dataclass(frozen=True)
class Group:
    """The all-reduces of a library on a number of ranks.

    Attributes:
        sums: by algorithm.
        is_oversubscribed: whether there are fewer cores than ranks.
    """

    engine: Library
    ranks: int
    sums: Mapping[str, Sums]
    is_oversubscribed: bool

    @cached_property
    def network(self) -> Network | None:
        """Return overhead, alpha and beta, fitted to all algorithms together."""
        return fitted_network({name: sums.medians for name, sums in self.sums.items()}, self.ranks)

    @property
    def seconds(self) -> dict[str, Seconds]:
        """Return the seconds of the repeats by bytes, by algorithm."""
        return {name: sums.seconds for name, sums in self.sums.items()}

    @property
    def repeats(self) -> int:
        """Return the smallest number of repeats of an algorithm."""
        return min(len(values) for sums in self.sums.values() for values in sums.seconds.values())

    @property
    def words(self) -> str:
        """Return library and ranks for a table."""
        return f"{LIBRARIES[self.engine]}, {self.ranks}{self._remark}"

    @property
    def _remark(self) -> str:
        return " (oversubscribed)" if self.is_oversubscribed else ""

    @property
    def title(self) -> str:
        """Return library and ranks in words."""
        return f"{LIBRARIES[self.engine]}, {self.ranks} ranks{self._remark}"

    def textbook(self, algorithm: str) -> dict[int, float] | None:
        """Return the seconds by bytes by the textbook's counts and the group's network."""
        work, network = counts(algorithm, self.ranks), self.network
        if work is None or network is None:
            return None
        return {size: work.seconds(network, size) for size in self.sums[algorithm].medians}


def arrange(contents: Iterable[tuple[SumCell, Mapping[str, Any]]], cores: int) -> list[Group]:
    """Return the groups with anything measured, by library and number of ranks."""
    collected: dict[tuple[Library, int], dict[str, dict[int, list[float]]]] = {}
    for cell, content in contents:
        for library, by_size in content["seconds"].items():
            group = collected.setdefault((library, cell.ranks), {})
            for size, seconds in by_size.items():
                group.setdefault(cell.algorithm, {}).setdefault(int(size), []).append(seconds)
    order = list(LIBRARIES)
    return [
        Group(
            library,
            ranks,
            {name: Sums(name, ranks, seconds) for name, seconds in sums.items()},
            ranks > cores,
        )
        for (library, ranks), sums in sorted(
            collected.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
        )
    ]


@dataclass(frozen=True)
class Steps:
    """The measured and the predicted steps of an arm; one prediction per profile."""

    arm: Arm
    runs: Sequence[Result]
    predictions: "Sequence[Prediction]"

    @property
    def measured(self) -> list[float]:
        """Return the seconds per step of the runs."""
        return [run.step_seconds for run in self.runs]

    @property
    def exposed(self) -> float:
        """Return the seconds per step in which ranks waited for sums, median of the runs."""
        return median(run.exposed / run.train_seconds * run.step_seconds for run in self.runs)

    def predicted(self, part: "Callable[[Prediction], float]") -> Estimate:
        """Return a part of the prediction, the median over the profiles."""
        return estimate([part(prediction) for prediction in self.predictions])

    @property
    def prediction_ratio(self) -> Estimate:
        """Return predicted over measured seconds per step."""
        return ratio([prediction.step for prediction in self.predictions], self.measured)
