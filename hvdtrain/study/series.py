"""Series of runs: one model and one kind of plan at several sizes, compared with one rank."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from statistics import median as middle

import numpy as np
from scipy import special

from hvdtrain.options.requests import Pipeline, parse_plan_request
from hvdtrain.options.sections import SyncOptions
from hvdtrain.study.laws import Estimate, Laws, Scaling, compare, median, ratio, serial_fraction
from hvdtrain.study.results import EXACT, Result

SYNC_OPTIONS = frozenset(item.name for item in fields(SyncOptions))
SCALINGS: tuple[Scaling, ...] = ("strong", "weak")


@dataclass(frozen=True)
class Lost:
    """Seconds of a run's steps by cause, beyond a perfect division of one rank's time (medians).

    Attributes:
        ideal: one rank's time for the same number of images, divided by the number of ranks.
        imbalance: waiting for a slower rank.
        communication: all other waiting for communication.
        bubble: waiting for other stages of a pipeline.
        data: waiting for images, beyond the wait of one rank.
        computing: the rest, such as the effect of shared caches and memory.
        between: evaluation, checkpoints and all else between the steps; not part of them.
        evaluation: that part of `between`, None if a run did not record it.
        startup: before the first step; not part of the steps.
    """

    ideal: float
    imbalance: float
    communication: float
    bubble: float
    data: float
    computing: float
    between: float
    evaluation: float | None
    startup: float

    @property
    def shares(self) -> dict[str, float]:
        """The parts of the time of the steps by cause that are not ideal, the largest first.

        They are negative if a cause makes the steps shorter.
        """
        causes = {
            "slower computing": self.computing,
            "communication": self.communication,
            "imbalance": self.imbalance,
            "the bubble of the pipeline": self.bubble,
            "data": self.data,
        }
        whole = self.ideal + sum(causes.values())
        return {
            name: seconds / whole
            for name, seconds in sorted(causes.items(), key=lambda item: -item[1])
        }


@dataclass(frozen=True)
class Size:
    """Repeats with one number of ranks.

    Attributes:
        serial_fraction: that of Karp and Flatt in strong scaling; None without a speed-up, and
            where it is more than linear, which the formula does not know.
    """

    ranks: int
    runs: tuple[Result, ...]
    images_per_second: Estimate
    speedup: Estimate
    efficiency: Estimate
    speedup_over_best: Estimate
    seconds: Estimate
    core_hours: Estimate
    lost: Lost
    serial_fraction: Estimate | None


@dataclass(frozen=True)
class Series:
    """A model under one kind of plan, with one way to agree.

    Attributes:
        agreement: how replicas agree.
        plan: dp, mp, hp (or hp:SxR, if a number of ranks has several of them), or a file.
        batch_size: global in strong scaling, per rank in weak scaling.
        scaling: strong if all sizes take the same global batch, weak if each rank takes the same.
        best_serial: the fastest one-rank runs with any number of threads.
        sizes: sizes by number of ranks, starting with one rank.
        laws: the scaling laws that there are enough sizes for.
    """

    model: str
    framework: str
    plan: str
    scaling: Scaling
    batch_size: int
    precision: str
    best_serial: tuple[Result, ...]
    sizes: tuple[Size, ...]
    laws: Laws
    agreement: str = EXACT

    @property
    def title(self) -> str:
        """Return the model, plan, precision, scaling, batch and agreement as text."""
        batch = f"batch {self.batch_size}" + (" per rank" if self.scaling == "weak" else "")
        model = self.model if self.framework == "torch" else f"{self.model} ({self.framework})"
        text = f"{model}, {self.plan}, {self.precision}, {self.scaling} scaling, {batch}"
        return text if self.agreement == EXACT else f"{text}, {self.agreement}"

    @property
    def runs(self) -> list[Result]:
        """All runs, those of the best serial size included."""
        return [*self.best_serial, *(run for size in self.sizes for run in size.runs)]

    @property
    def disturbed(self) -> list[Result]:
        """The runs that are slower than their repeats by more than noise explains."""
        rates = {size.ranks: _rates(size.runs) for size in self.sizes}
        places = disturbed(rates)
        return [size.runs[place] for size in self.sizes for place in places.get(size.ranks, [])]

    def worth(self, efficiency: float) -> int:
        """Return the largest measured number of ranks with at least this efficiency.

        It is at least 1, because one rank has an efficiency of 1.
        """
        return max(size.ranks for size in self.sizes if size.efficiency.value >= efficiency)


def arrange(results: Iterable[Result]) -> tuple[list[Series], list[str]]:
    """Group runs into series; return them, and a line for each run that is in none.

    One rank has nobody to agree with: it is the baseline of all ways to agree.
    """
    groups: dict[str, list[Result]] = defaultdict(list)
    left_out: list[str] = []
    for result in results:
        if not result.has_one_size:
            left_out.append(
                f"{result.name}: it resumed with another plan or number of ranks, so it belongs "
                "to no size"
            )
            continue
        settings = {k: value for k, value in result.settings.items() if k not in SYNC_OPTIONS}
        groups[json.dumps([result.model, settings], sort_keys=True)].append(result)
    all_series: list[Series] = []
    for runs in groups.values():
        serial = [run for run in runs if run.ranks == 1]
        used: set[object] = set()
        for plan, parallel in _by_way([run for run in runs if run.ranks > 1]):
            for scaling in SCALINGS:
                # A run that is part of a strong series is not used again in a weak one.
                pending = [run for run in parallel if run.path not in used]
                for series in _all_series(plan, scaling, serial, pending):
                    all_series.append(series)
                    used |= {run.path for size in series.sizes for run in size.runs}
                    used |= {run.path for run in series.best_serial}
        left_out += [
            f"{run.name}: no run on one rank with the same settings and threads to compare it with"
            if run.ranks > 1
            else f"{run.name}: no run on several ranks to compare with it"
            for run in runs
            if run.path not in used
        ]
    return all_series, left_out


def _by_way(runs: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Return plans with their runs, once for each way to agree."""
    ways = sorted({run.agreement for run in runs})
    return [
        group
        for way in ways
        for group in _by_plan(run for run in runs if run.agreement == way).items()
    ]


def _by_plan(runs: Iterable[Result]) -> dict[str, list[Result]]:
    """Group runs by plan.

    All hybrid plans are one group, unless a number of ranks has several of them.
    """
    groups: dict[str, list[Result]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.plan):
        groups["hp" if _is_hybrid(run.plan) else run.plan].append(run)
    hybrid = groups.get("hp", [])
    if len({(run.ranks, run.plan) for run in hybrid}) > len({run.ranks for run in hybrid}):
        del groups["hp"]
        for run in hybrid:
            groups[run.plan].append(run)
    return groups


def _is_hybrid(plan: str) -> bool:
    """Return whether a plan is `hp:SxR`, with numbers of its own, unlike `mp`."""
    request = parse_plan_request(plan)
    return isinstance(request, Pipeline) and request.stages is not None


def _all_series(
    plan: str, scaling: Scaling, serial: Sequence[Result], parallel: Sequence[Result]
) -> list[Series]:
    """Return a series for each batch and number of threads that has runs on one rank and several.

    Args:
        serial: runs on one rank.
        parallel: runs on several ranks.
    """
    serial_keys = {(float(run.batch_size), run.threads) for run in serial}
    shared = serial_keys & {(_batch(run, scaling), run.threads) for run in parallel}
    all_series = []
    for batch, threads in sorted(shared):
        base = [run for run in serial if (run.batch_size, run.threads) == (batch, threads)]
        by_threads: dict[int, list[Result]] = defaultdict(list)
        for run in serial:
            if run.batch_size == batch:
                by_threads[run.threads].append(run)
        best = max(by_threads.values(), key=lambda runs: np.median(_rates(runs)))
        by_ranks: dict[int, list[Result]] = defaultdict(list, {1: base})
        for run in parallel:
            if (_batch(run, scaling), run.threads) == (batch, threads):
                by_ranks[run.ranks].append(run)
        sizes = tuple(_size(by_ranks[ranks], base, best, scaling) for ranks in sorted(by_ranks))
        series = Series(
            model=base[0].model,
            plan=plan,
            scaling=scaling,
            batch_size=round(batch),
            framework=str(base[0].settings.get("framework", "torch")),
            precision=str(base[0].settings.get("precision", "fp32")),
            best_serial=tuple(best),
            sizes=sizes,
            agreement=sizes[-1].runs[0].agreement,
            laws=compare({size.ranks: _rates(size.runs) for size in sizes}, scaling),
        )
        all_series.append(series)
    return all_series


def _batch(run: Result, scaling: Scaling) -> float:
    return run.batch_size if scaling == "strong" else run.batch_size / run.ranks


def _size(
    runs: Sequence[Result], base: Sequence[Result], best: Sequence[Result], scaling: Scaling
) -> Size:
    ranks = runs[0].ranks
    speedup = ratio(_rates(runs), _rates(base))
    return Size(
        ranks=ranks,
        runs=tuple(runs),
        images_per_second=median(_rates(runs)),
        speedup=speedup if runs is not base else Estimate(1.0),
        efficiency=speedup.through(lambda value: value / ranks)
        if runs is not base
        else Estimate(1.0),
        speedup_over_best=ratio(_rates(runs), _rates(best)) if runs != best else Estimate(1.0),
        seconds=median([run.seconds for run in runs]),
        core_hours=median([run.core_hours for run in runs]),
        lost=_lost(runs, base),
        serial_fraction=serial_fraction(speedup, ranks)
        if scaling == "strong" and 1 < speedup.value < ranks
        else None,
    )


def _lost(runs: Sequence[Result], base: Sequence[Result]) -> Lost:
    """Return the time by cause: the median of each part, and `computing` as the remainder.

    Medians of different repeats need not add up to the whole, so the remainder is computed last.
    """
    seconds_per_image = middle(run.train_seconds / run.samples for run in base)
    data_per_image = middle(run.data / run.samples for run in base)
    samples = middle(run.samples for run in runs)
    ideal = seconds_per_image * samples / runs[0].ranks
    imbalance = middle(min(run.imbalance, run.exposed) for run in runs)
    communication = middle(run.exposed for run in runs) - imbalance
    bubble = middle(run.bubble for run in runs)
    data = middle(run.data for run in runs) - data_per_image * samples / runs[0].ranks
    whole = middle(run.train_seconds for run in runs)
    evaluations = [run.evaluation for run in runs if run.evaluation is not None]
    return Lost(
        ideal=ideal,
        imbalance=imbalance,
        communication=communication,
        bubble=bubble,
        data=data,
        computing=whole - ideal - imbalance - communication - bubble - data,
        between=middle(run.seconds - run.train_seconds for run in runs),
        evaluation=middle(evaluations) if len(evaluations) == len(runs) else None,
        startup=middle(run.startup_seconds for run in runs),
    )


def _rates(runs: Iterable[Result]) -> list[float]:
    return [run.images_per_second for run in runs]


FALSE_ALARMS = 0.01  # of the undisturbed runs
LEAST = 0.02  # a smaller loss of throughput is not called a disturbance
REPEATS_NEEDED = 3  # of two runs nobody can say which one is disturbed
# The first quartile of the differences of two values with unit normal noise.
QUARTILE = float(np.sqrt(2) * special.ndtri(0.625))


def disturbed(rates: Mapping[int, Sequence[float]]) -> dict[int, list[int]]:
    """Return the places of runs whose throughput is lower than noise explains.

    Args:
        rates: throughputs of repeats by number of ranks. All have the same
            relative noise, which is estimated from the differences of any two repeats, so that
            disturbed runs hardly change it (as Q_n of Rousseeuw and Croux, JASA 88, 1993).

    Returns:
        Places by number of ranks; sizes without disturbed runs are left out.
    """
    logs = {key: np.log(values) for key, values in rates.items() if len(values) >= REPEATS_NEEDED}
    if not logs:
        return {}
    noise = _noise(logs.values())
    degrees = sum(len(values) - 1 for values in logs.values())
    # Each of the repeats is compared with the others: the limit holds for all of them together.
    limit = float(-special.stdtrit(degrees, FALSE_ALARMS))
    places: dict[int, list[int]] = {}
    for key, values in logs.items():
        for place, value in enumerate(values):
            others = np.delete(values, place)
            spread = noise * np.sqrt(1 + np.pi / 2 / len(others))
            loss = float(np.median(others)) - value
            if loss > max(limit * spread, LEAST):
                places.setdefault(key, []).append(place)
    return places


def _noise(groups: Iterable[np.ndarray]) -> float:
    differences = [abs(one - other) for values in groups for one, other in combinations(values, 2)]
    return float(np.quantile(differences, 0.25)) / QUARTILE
