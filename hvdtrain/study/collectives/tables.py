"""The numbers of the study of all-reduces as CSV, in seconds and bytes."""

from collections.abc import Sequence
from typing import Any

from hvdtrain.host.harmless import as_csv
from hvdtrain.study.collectives.results import Group, Steps
from hvdtrain.study.collectives.verdicts import Crossover
from hvdtrain.study.statistics import Estimate, median

INTERVAL = ("", "_low", "_high")


def sums_csv(groups: Sequence[Group]) -> str:
    """Return all measured all-reduces, with the fitted line and the textbook's counts."""
    heads = ["library", "ranks", "oversubscribed", "algorithm", "bytes", "repeats"]
    heads += [*(f"seconds{end}" for end in INTERVAL), "fitted", "textbook"]
    rows = [
        [group.engine, group.ranks, group.is_oversubscribed, name, size, len(sums.seconds[size])]
        + _ends(median(list(sums.seconds[size])))
        + [sums.fitted[size], (group.textbook(name) or {}).get(size)]
        for group in groups
        for name, sums in group.sums.items()
        for size in sums.medians
    ]
    return as_csv(heads, rows)


def fits_csv(groups: Sequence[Group]) -> str:
    """Return the line of each algorithm, its counts, and alpha and beta of its group."""
    heads = ["library", "ranks", "oversubscribed", "algorithm", "messages", "volume"]
    heads += [f"{name}{end}" for name in ("latency", "seconds_per_byte") for end in INTERVAL]
    heads += ["overhead", "alpha", "beta"]
    rows = []
    for group in groups:
        for name, sums in group.sums.items():
            row: list[Any] = [group.engine, group.ranks, group.is_oversubscribed, name]
            row += [*(sums.counts or (None, None))]
            row += _ends(sums.fit_of_repeats(lambda line: line.fixed))
            row += _ends(sums.fit_of_repeats(lambda line: line.per_unit))
            rows.append(row + [*(group.network or (None,) * 3)])
    return as_csv(heads, rows)


def crossovers_csv(crossings: Sequence[Crossover]) -> str:
    """Return the crossovers, predicted and measured."""
    heads = ["library", "ranks", "oversubscribed", "first", "second"]
    heads += [f"predicted_{name}" for name in ("below", "above", "bytes")]
    heads += [f"measured_{name}" for name in ("below", "above", "bytes", "from", "to")]
    rows = []
    for item in crossings:
        group, predicted, measured = item.group, item.predicted, item.measured
        row: list[Any] = [group.engine, group.ranks, group.is_oversubscribed, *item.pair]
        row += [predicted.below, predicted.above, predicted.size]
        row += [measured.below, measured.above, measured.size]
        rows.append([*row, *(measured.between or (None, None)), item.verdict])
    return as_csv([*heads, "verdict"], rows)


def steps_csv(steps: Sequence[Steps]) -> str:
    """Return the measured and the predicted seconds per step."""
    heads = ["model", "ranks", "library", "algorithm", "steps", "repeats"]
    heads += [f"{name}{end}" for name in ("measured", "predicted", "ratio") for end in INTERVAL]
    heads += ["sums_alone_predicted", "not_hidden_predicted", "waiting_measured"]
    rows = [
        [item.arm.model, item.arm.ranks, item.arm.engine, item.arm.algorithm, item.arm.steps]
        + [len(item.runs)]
        + _ends(median(item.measured))
        + _ends(item.predicted(lambda prediction: prediction.step))
        + _ends(item.prediction_ratio)
        + [item.predicted(lambda prediction: prediction.alone).value]
        + [item.predicted(lambda prediction: prediction.added).value, item.exposed]
        for item in steps
    ]
    return as_csv(heads, rows)


def _ends(estimate: Estimate) -> list[Any]:
    return [estimate.value, estimate.low, estimate.high]
