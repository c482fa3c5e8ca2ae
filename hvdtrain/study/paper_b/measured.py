"""Tables of the time, memory and accuracy that were measured, and a verdict per claim."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.planner.strategies import EPOCHS, IMAGES
from hvdtrain.study.paper_b import claims
from hvdtrain.study.paper_b.arms import ADAPTIVE, DP, HYBRID, MP, SINGLE
from hvdtrain.study.report import markdown_table, number
from hvdtrain.study.results import Result
from hvdtrain.study.statistics import (
    Estimate,
    difference,
    equivalence,
    is_shown,
    median,
    ratio,
)

MARGIN = claims.POINTS / 100
CLAIMED = {SINGLE: "3.8x (ResNet-50) and 3.2x (ViT)", HYBRID: "1.18x and 1.15x"}


@dataclass(frozen=True)
class Measured:
    """The finished runs of one model by strategy.

    Attributes:
        accuracy: empty if accuracy was left out.
    """

    model: str
    ranks: int
    timed: Mapping[str, Sequence[Result]]
    accuracy: Mapping[str, Sequence[Result]]

    def hours(self, strategy: str) -> list[float]:
        """Return the hours of the paper's epochs, extrapolated from the step of each run."""
        return [
            -(-IMAGES // run.batch_size) * EPOCHS * run.step_seconds / 3600
            for run in self.timed[strategy]
        ]

    def speedup(self, strategy: str, base: str) -> Estimate:
        """Return how many times faster a strategy is than another one."""
        return ratio(self.hours(base), self.hours(strategy))

    def communication(self, strategy: str) -> Estimate:
        """Return the share of the steps in which ranks wait for communication."""
        return median([run.exposed / run.train_seconds for run in self.timed[strategy]])

    def memory_bytes(self, strategy: str) -> Estimate:
        """Return the peak memory of the rank that uses most."""
        return median([float(run.peak_memory_bytes) for run in self.timed[strategy]])

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
                "peak memory, MiB": f"{measured.memory_bytes(strategy).value / 2**20:,.0f}",
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
    for base, claim in CLAIMED.items():
        if base in measured.timed:
            lines.append(
                f"- adaptive over {base}: the paper reports {claim} on 8 GPUs; measured "
                f"{_faster(measured.speedup(ADAPTIVE, base))}"
            )
    best = measured.best_static
    lines.append(
        "- adaptive is the fastest strategy: over the best static one, "
        f"{best}, {_faster(measured.speedup(ADAPTIVE, best))}"
    )
    if MP in measured.timed and DP in measured.timed:
        least, most = (measured.memory_bytes(name) for name in (MP, DP))
        lines.append(
            f"- MP needs less memory per device than DP: {least.value / 2**20:,.0f} and "
            f"{most.value / 2**20:,.0f} MiB; {_verdict(least.value < most.value)}"
        )
    if measured.accuracy:
        lines.append(_accuracy_verdict(measured))
    return lines


def _faster(speedup: Estimate) -> str:
    text = f"{number(speedup, '.2f')}x"
    if speedup.low is None or speedup.high is None:
        return f"{text}; one run of each cannot tell"
    if speedup.low <= 1 <= speedup.high:
        return f"{text}; that is within the noise"
    return f"{text}; {_verdict(speedup.low > 1)}"


def _verdict(holds: bool) -> str:
    return "the claim holds here" if holds else "the claim does not hold here"


def _accuracy_verdict(measured: Measured) -> str:
    single = _accuracies(measured.accuracy[SINGLE])
    open_ones = [
        strategy
        for strategy, runs in measured.accuracy.items()
        if strategy != SINGLE and not is_shown(equivalence(_accuracies(runs), single, MARGIN))
    ]
    what = f"- all accuracies are within {claims.POINTS:g} points of single:"
    return f"{what} not shown for {', '.join(open_ones)}" if open_ones else f"{what} shown"
