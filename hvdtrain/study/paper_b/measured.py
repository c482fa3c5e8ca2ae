"""Tables of the time, memory and accuracy that were measured, and a verdict per claim."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from hvdtrain.planner.strategies import EPOCHS, IMAGES
from hvdtrain.study.paper_b import claims
from hvdtrain.study.paper_b.arms import ADAPTIVE, DP, HYBRID, MP, SINGLE, same_as
from hvdtrain.study.paper_b.objective import Group, Optimum
from hvdtrain.study.results import Result
from hvdtrain.study.statistics import (
    Estimate,
    difference,
    equivalence,
    is_shown,
    median,
    ratio,
)
from hvdtrain.study.tables import markdown_table, number

MARGIN = claims.POINTS / 100
# Speed-ups of adaptive that the paper's text states, by what it is compared with.
CLAIMED = {SINGLE: claims.STATED_SPEEDUP, HYBRID: claims.STATED_OVER_HYBRID}


@dataclass(frozen=True)
class Measured:
    """The finished runs of one model by strategy.

    Attributes:
        accuracy: empty if accuracy was left out.
        optima: of the paper's objective, by how it is read.
    """

    model: str
    ranks: int
    timed: Mapping[str, Sequence[Result]]
    accuracy: Mapping[str, Sequence[Result]]
    optima: Mapping[str, Optimum] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return the name in the report."""
        return f"{self.model}, {self.ranks} ranks"

    @property
    def images_per_step(self) -> int:
        """Return the images per step of the timed runs."""
        return next(run.batch_size for runs in self.timed.values() for run in runs)

    def hours(self, strategy: str) -> list[float]:
        """Return the hours of the paper's epochs, extrapolated from the step of each run."""
        return [
            -(-IMAGES // run.batch_size) * EPOCHS * run.step_seconds / 3600
            for run in self.timed[strategy]
        ]

    def step_seconds(self, strategy: str) -> Estimate:
        """Return the median seconds of a step."""
        return median([run.step_seconds for run in self.timed[strategy]])

    def speedup(self, strategy: str, base: str) -> Estimate:
        """Return how many times faster a strategy is than another one."""
        return ratio(self.hours(base), self.hours(strategy))

    def communication(self, strategy: str) -> Estimate:
        """Return the share of the steps in which ranks wait for communication."""
        return median([run.exposed / run.train_seconds for run in self.timed[strategy]])

    def memory_bytes(self, strategy: str) -> list[float]:
        """Return the peak memory of each run, that of the rank that uses most."""
        return [float(run.peak_memory_bytes) for run in self.timed[strategy]]

    @property
    def best_static(self) -> str:
        """Return the fastest of the strategies that do not change."""
        static = [name for name in self.timed if name != ADAPTIVE]
        return min(static, key=lambda name: median(self.hours(name)).value)


def time_table(measured: Measured) -> str:
    """Return table I as measured, with intervals."""
    rows = []
    for strategy, runs in measured.timed.items():
        rates = [run.batch_size / run.step_seconds for run in runs]
        bubbles = median([run.bubble / run.train_seconds for run in runs])
        memory = median(measured.memory_bytes(strategy)).value
        rows.append(
            {
                "strategy": strategy,
                "ranks": str(runs[0].ranks),
                "images/s": number(median(rates), ",.1f"),
                f"hours for {EPOCHS} epochs (extrapolated)": number(
                    median(measured.hours(strategy)), ".1f"
                ),
                "speed-up over single": number(measured.speedup(strategy, SINGLE), ".2f"),
                "communication": f"{measured.communication(strategy).value:.1%}",
                "bubble": f"{bubbles.value:.1%}",
                "peak memory, MiB": f"{memory / 2**20:,.0f}",
            }
        )
    return markdown_table(rows)


def accuracy_table(measured: Measured) -> str:
    """Return the accuracy by strategy, and whether it is equivalent to that of one rank."""
    rows = []
    single = _accuracies(measured.accuracy[SINGLE])
    for strategy, runs in measured.accuracy.items():
        values = _accuracies(runs)
        points = "-"
        equivalent = "-"
        if strategy != SINGLE:
            points = number(_in_points(difference(values, single)), "+.2f")
            equivalent = "shown" if is_shown(equivalence(values, single, MARGIN)) else "not shown"
        rows.append(
            {
                "strategy": strategy,
                "test accuracy": number(median(values), ".4f"),
                "points from single": points,
                f"within {claims.POINTS:g} points": equivalent,
            }
        )
    return markdown_table(rows)


def _in_points(accuracy: Estimate) -> Estimate:
    low, high = (None if end is None else 100 * end for end in (accuracy.low, accuracy.high))
    return Estimate(100 * accuracy.value, low, high)


def _accuracies(runs: Sequence[Result]) -> list[float]:
    return [run.accuracy for run in runs if run.accuracy is not None]


def verdicts(measured: Measured) -> list[str]:
    """Return a line per claim of the paper: what was measured, and whether it holds here."""
    lines = []
    for base, claimed in CLAIMED.items():
        if base in measured.timed:
            stated = " and ".join(f"{value}x" for value in claimed.values())
            # A speed-up over one device has a size only for a number of devices.
            is_comparable = base != SINGLE or measured.ranks == claims.GPUS
            speedup = measured.speedup(ADAPTIVE, base)
            lines.append(
                f"- adaptive over {base}: the paper reports {stated} on {claims.GPUS} GPUs; "
                f"measured {number(speedup, '.2f')}x on {measured.ranks} ranks: "
                f"{_verdict(speedup, min(claimed.values()) if is_comparable else None)}"
            )
    best = measured.best_static
    over_best = measured.speedup(ADAPTIVE, best)
    lines.append(
        f"- adaptive is the fastest strategy: {number(over_best, '.2f')}x over the best static "
        f"one, {best}: {_verdict(over_best)}"
    )
    if MP in measured.timed and DP in measured.timed:
        needed = ratio(measured.memory_bytes(DP), measured.memory_bytes(MP))
        lines.append(
            f"- MP needs less memory per device than DP: DP needed {number(needed, '.2f')} times "
            f"the memory of MP: {_verdict(needed)}"
        )
    if measured.accuracy:
        lines.append(_accuracy_verdict(measured))
    return lines


def objective_lines(measured: Measured) -> list[str]:
    """Return a line per reading of the paper's objective: its optimum, and what it is here."""
    lines = []
    for reading, optimum in measured.optima.items():
        same = same_as(optimum, measured.ranks)
        where = [
            f"{' to '.join(dict.fromkeys((names[0], names[-1])))} on "
            f"rank {', '.join(map(str, group))}"
            for group, names in _neighbours(optimum.groups)
        ]
        result = "It leaves ranks idle, which a plan may not: not measured."
        if same is not None and same not in measured.timed:
            result = "Not measured: this model is trained by the strategies of table I only."
        elif same is not None:
            seconds = measured.step_seconds(same).value
            result = f"Measured (row {same}): {1e3 * seconds:.0f} ms."
        lines.append(
            f"- {reading}: {'; '.join(where)}. The objective promises "
            f"{1e3 * optimum.seconds:.0f} ms per step. {result}"
        )
    return lines


def _neighbours(groups: Mapping[str, Group]) -> list[tuple[Group, list[str]]]:
    """Return the components in model order, neighbours on the same ranks together."""
    return [
        (group, [name for name, _ in held])
        for group, held in groupby(groups.items(), key=lambda item: item[1])
    ]


def _verdict(value: Estimate, claimed: float | None = 1.0) -> str:
    """Return what a measured ratio says of the claim that it is at least `claimed`.

    Args:
        claimed: None if only the claim that it is above 1 can be compared.
    """
    if value.low is None or value.high is None:
        return "one run of each cannot tell"
    if value.low <= 1 <= value.high:
        return "within the noise"
    if value.high < 1:
        return "the claim does not hold here"
    if claimed is None:
        return f"faster, and how much is claimed for {claims.GPUS} GPUs only"
    return "faster, by less than claimed" if value.high < claimed else "the claim holds here"


def _accuracy_verdict(measured: Measured) -> str:
    single = _accuracies(measured.accuracy[SINGLE])
    open_ones = [
        strategy
        for strategy, runs in measured.accuracy.items()
        if strategy != SINGLE and not is_shown(equivalence(_accuracies(runs), single, MARGIN))
    ]
    what = f"- all accuracies are within {claims.POINTS:g} points of single:"
    return f"{what} not shown for {', '.join(open_ones)}" if open_ones else f"{what} shown"
