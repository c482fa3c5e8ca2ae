"""Runs of one model under one kind of plan at several sizes, compared with one rank."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median as middle
from typing import Literal

import numpy as np

from hvdtrain.study.results import Result
from hvdtrain.study.statistics import Estimate, Fit, amdahl, median, ratio, usl

Scaling = Literal["strong", "weak"]
SCALINGS: tuple[Scaling, ...] = ("strong", "weak")


@dataclass(frozen=True)
class Lost:
    """Seconds of a run's steps beyond a perfect division of one rank's time, medians.

    Attributes:
        ideal: one rank's time for as many images, divided by the ranks.
        imbalance: waiting for a slower rank.
        communication: all other waiting for communication.
        bubble: waiting for the turn in a pipeline.
        data: waiting for images, beyond what one rank waits.
        computing: the rest, such as caches and memory that ranks share.
        startup: before the first step; not part of the steps.
    """

    ideal: float
    imbalance: float
    communication: float
    bubble: float
    data: float
    computing: float
    startup: float


@dataclass(frozen=True)
class Size:
    """The repeats with one number of ranks."""

    ranks: int
    runs: tuple[Result, ...]
    images_per_second: Estimate
    speedup: Estimate
    efficiency: Estimate
    speedup_over_best: Estimate
    seconds: Estimate
    core_hours: Estimate
    lost: Lost


@dataclass(frozen=True)
class Series:
    """A model under one kind of plan.

    Attributes:
        plan: dp, mp, hp (or hp:SxR, where one number of ranks has several), or a file.
        batch_size: of all ranks together in strong scaling, of each rank in weak scaling.
        scaling: strong if all sizes take the same global batch, weak if each rank takes the same.
        best_serial: the fastest one-rank runs with any number of threads.
        sizes: by number of ranks, from one.
        fits: Amdahl's law and the USL, where there are sizes enough.
    """

    model: str
    framework: str
    plan: str
    scaling: Scaling
    batch_size: int
    precision: str
    best_serial: tuple[Result, ...]
    sizes: tuple[Size, ...]
    fits: tuple[Fit, ...]

    @property
    def title(self) -> str:
        """In words."""
        batch = f"batch {self.batch_size}" + (" a rank" if self.scaling == "weak" else "")
        model = self.model if self.framework == "torch" else f"{self.model} ({self.framework})"
        return f"{model}, {self.plan}, {self.precision}, {self.scaling} scaling, {batch}"

    def worth(self, efficiency: float) -> int:
        """The most ranks measured that are used at least so well; 1 has an efficiency of 1."""
        return max(size.ranks for size in self.sizes if size.efficiency.value >= efficiency)


def arrange(results: Iterable[Result]) -> tuple[list[Series], list[str]]:
    """The series that these runs make, and a line for each run that is in none."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[json.dumps([result.model, result.settings], sort_keys=True)].append(result)
    found: list[Series] = []
    left_out: list[str] = []
    for runs in groups.values():
        alone = [run for run in runs if run.ranks == 1]
        used: set[object] = set()
        for plan, several in _by_plan([run for run in runs if run.ranks > 1]).items():
            for scaling in SCALINGS:
                # A run that is compared as strong scaling is not one of weak scaling, too.
                pending = [run for run in several if run.path not in used]
                for made in _all_series(plan, scaling, alone, pending):
                    found.append(made)
                    used |= {run.path for size in made.sizes for run in size.runs}
                    used |= {run.path for run in made.best_serial}
        left_out += [
            f"{run.path}: no run on one rank with the same settings and threads to compare it with"
            if run.ranks > 1
            else f"{run.path}: no run on several ranks to compare with it"
            for run in runs
            if run.path not in used
        ]
    return found, left_out


def _by_plan(runs: Iterable[Result]) -> dict[str, list[Result]]:
    """Runs that make one series: hp:2x1 and hp:2x2 do, unless a number of ranks has both kinds."""
    found: dict[str, list[Result]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.plan):
        found["hp" if run.plan.startswith("hp:") else run.plan].append(run)
    hybrid = found.get("hp", [])
    if len({(run.ranks, run.plan) for run in hybrid}) > len({run.ranks for run in hybrid}):
        del found["hp"]
        for run in hybrid:
            found[run.plan].append(run)
    return found


def _all_series(
    plan: str, scaling: Scaling, alone: Sequence[Result], several: Sequence[Result]
) -> list[Series]:
    """A series for each batch and number of threads that one rank and several have."""
    of_alone = {(float(run.batch_size), run.threads) for run in alone}
    shared = of_alone & {(_batch(run, scaling), run.threads) for run in several}
    return [_series(plan, scaling, wanted, alone, several) for wanted in sorted(shared)]


def _batch(run: Result, scaling: Scaling) -> float:
    return run.batch_size if scaling == "strong" else run.batch_size / run.ranks


def _series(
    plan: str,
    scaling: Scaling,
    wanted: tuple[float, int],
    alone: Sequence[Result],
    several: Sequence[Result],
) -> Series:
    """The series of a batch and a number of threads."""
    base = [run for run in alone if (run.batch_size, run.threads) == wanted]
    same_batch = [run for run in alone if run.batch_size == wanted[0]]
    by_threads: dict[int, list[Result]] = defaultdict(list)
    for run in same_batch:
        by_threads[run.threads].append(run)
    best = max(by_threads.values(), key=lambda runs: np.median(_rates(runs)))
    by_ranks: dict[int, list[Result]] = defaultdict(list)
    by_ranks[1] = base
    for run in several:
        if (_batch(run, scaling), run.threads) == wanted:
            by_ranks[run.ranks].append(run)
    sizes = tuple(_size(by_ranks[ranks], base, best) for ranks in sorted(by_ranks))
    rates = {size.ranks: _rates(size.runs) for size in sizes}
    return Series(
        model=base[0].model,
        plan=plan,
        scaling=scaling,
        batch_size=round(wanted[0]),
        framework=str(base[0].settings.get("framework", "torch")),
        precision=str(base[0].settings.get("precision", "fp32")),
        best_serial=tuple(best),
        sizes=sizes,
        # Amdahl's law is of a problem that does not grow.
        fits=tuple(
            fit
            for fit in (amdahl(rates) if scaling == "strong" else None, usl(rates))
            if fit is not None
        ),
    )


def _size(runs: Sequence[Result], base: Sequence[Result], best: Sequence[Result]) -> Size:
    ranks = runs[0].ranks
    speedup = ratio(_rates(runs), _rates(base))
    return Size(
        ranks=ranks,
        runs=tuple(runs),
        images_per_second=median(_rates(runs)),
        speedup=speedup if runs is not base else Estimate(1.0),
        efficiency=_divided(speedup, ranks) if runs is not base else Estimate(1.0),
        speedup_over_best=ratio(_rates(runs), _rates(best)),
        seconds=median([run.seconds for run in runs]),
        core_hours=median([run.core_hours for run in runs]),
        lost=_lost(runs, base),
    )


def _lost(runs: Sequence[Result], base: Sequence[Result]) -> Lost:
    """For the median of each part: parts of different repeats need not add up to the whole."""
    seconds_an_image = middle(run.train_seconds / run.samples for run in base)
    data_an_image = middle(run.data / run.samples for run in base)
    samples = middle(run.samples for run in runs)
    ideal = seconds_an_image * samples / runs[0].ranks
    imbalance = middle(min(run.imbalance, run.exposed) for run in runs)
    communication = middle(run.exposed for run in runs) - imbalance
    bubble = middle(run.bubble for run in runs)
    data = middle(run.data for run in runs) - data_an_image * samples / runs[0].ranks
    whole = middle(run.train_seconds for run in runs)
    return Lost(
        ideal=ideal,
        imbalance=imbalance,
        communication=communication,
        bubble=bubble,
        data=data,
        computing=whole - ideal - imbalance - communication - bubble - data,
        startup=middle(run.startup_seconds for run in runs),
    )


def _rates(runs: Iterable[Result]) -> list[float]:
    return [run.images_per_second for run in runs]


def _divided(estimate: Estimate, number: int) -> Estimate:
    low, high = estimate.low, estimate.high
    return Estimate(
        estimate.value / number,
        None if low is None else low / number,
        None if high is None else high / number,
    )
