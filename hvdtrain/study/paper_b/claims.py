"""The claims of paper B, one by one: what was found here, and a verdict.

A verdict is of an interval: a claim is shown if all of the interval agrees with it, contradicted
if none does, and else not shown. Numbers for eight GPUs are compared on eight ranks only; on
others a claim is that of its direction.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from hvdtrain.planner.strategies import EPOCHS
from hvdtrain.study.laws import (
    Estimate,
    difference,
    growth,
    markdown_table,
    median,
    number,
    ratio,
)
from hvdtrain.study.paper_b.plans import (
    ADAPTIVE,
    DP,
    FIGURE_6,
    GPUS,
    HYBRID,
    MP,
    POINTS,
    SINGLE,
    Measured,
)
from hvdtrain.study.paper_b.v100 import Prediction

# What the paper says of eight GPUs, and the size for each of its models.
SIZED = {
    (ADAPTIVE, SINGLE): (
        "adaptive is faster than one GPU: 3.8x (ResNet-50) and 3.2x (ViT-B/16) on eight",
        {"resnet": 3.8, "vit": 3.2},
    ),
    (HYBRID, SINGLE): (
        "hybrid is faster than one GPU: 3.2x on eight",
        {"resnet": 3.2, "vit": 3.2},
    ),
    (ADAPTIVE, HYBRID): (
        "adaptive is faster than static hybrid: 1.18x and 1.15x on eight",
        {"resnet": 1.18, "vit": 1.15},
    ),
}
SHOWN, NOT_SHOWN, CONTRADICTED = "shown", "not shown", "contradicted"
NEAR_LINEAR = 0.9  # part of a linear speed-up; the paper does not say what it means
NEAR_LINEAR_RANKS = 4
SMALLEST_SHARE = 1e-6  # of communication: ratios need positive numbers
# Models of one family, the smaller one first: the paper's gains grow with the model.
FAMILIES = (("resnet18", "resnet50"), ("vit_tiny", "vit_b16"), ("cnn", "resnet18"))


@dataclass(frozen=True)
class Claim:
    """A claim of the paper for one model, and what was found.

    Attributes:
        claim: in the paper's sense.
        result: the number that decides, with its interval.
        obtained: how.
    """

    claim: str
    model: str
    result: str
    verdict: str
    obtained: str


def verdict_of(value: Estimate, least: float) -> str:
    """Return whether a number is shown to be above another one."""
    if value.low is None or value.high is None:
        return f"{NOT_SHOWN} (one run of each)"
    if value.low > least:
        return SHOWN
    return CONTRADICTED if value.high < least else NOT_SHOWN


def claims_table(measured: Sequence[Measured], predictions: Sequence[Prediction]) -> str:
    """Return a row for each claim and model."""
    rows = [claim for one in measured for claim in (*of_times(one), *of_accuracies(one))]
    rows += [*of_sizes(measured), *of_predictions(predictions)]
    rows.sort(key=lambda row: row.claim)
    names = [item.name for item in fields(Claim)]
    return markdown_table([{name: getattr(row, name) for name in names} for row in rows])


def of_times(one: Measured) -> Iterator[Claim]:
    """Yield the claims on time, communication and memory of the runs of a model."""
    repeats = min(map(len, one.timed.values()))
    obtained = f"measured on {one.ranks} ranks, {repeats} run(s) of each"
    on_as_many = one.ranks == GPUS

    def claim(text: str, value: Estimate, form: str, least: float) -> Claim:
        result = form.format(number(value, ".2f"))
        return Claim(text, one.model, result, verdict_of(value, least), obtained)

    for (fast, slow), (text, sizes) in SIZED.items():
        if not {fast, slow} <= one.timed.keys():
            continue
        size = next((size for name, size in sizes.items() if one.model.startswith(name)), None)
        least = size if on_as_many and size is not None else 1.0
        more = "" if least != 1.0 else " (only the direction is judged here)"
        yield claim(f"{text}{more}", one.speedup(fast, slow), "{}x", least)
    if ADAPTIVE in one.timed:
        static = [name for name in one.timed if name != ADAPTIVE]
        best = min(static, key=lambda name: median(one.hours(name)).value)
        form = f"{{}}x of the best static one, {best}"
        yield claim("adaptive is the fastest", one.speedup(ADAPTIVE, best), form, 1.0)
    if DP in one.timed and one.ranks <= NEAR_LINEAR_RANKS:
        text = f"DP is near-linear (at least {NEAR_LINEAR:.0%} of it) up to 4 GPUs"
        efficiency = one.speedup(DP, SINGLE).through(lambda value: value / one.ranks)
        yield claim(text, efficiency, "{} of linear", NEAR_LINEAR)
    if {MP, DP} <= one.timed.keys():
        needed = ratio(one.memory_bytes(DP), one.memory_bytes(MP))
        yield claim("MP needs less memory per device than DP", needed, "DP: {} times", 1.0)
    if {ADAPTIVE, DP} <= one.timed.keys():
        data, adaptive = (
            [max(SMALLEST_SHARE, run.exposed / run.train_seconds) for run in one.timed[name]]
            for name in (DP, ADAPTIVE)
        )
        text = (
            "adaptive communicates for less of the time (27.1 and 25.3 %) than DP (42.3, 38.7 %)"
        )
        form = f"{np.median(adaptive):.1%} and {np.median(data):.1%}, a ratio of {{}}"
        yield claim(text, ratio(data, adaptive), form, 1.0)
    if FIGURE_6 in one.timed:
        others = [name for name in one.timed if name not in (FIGURE_6, SINGLE)]
        best = min(others, key=lambda name: median(one.hours(name)).value)
        text = "attention MP, MLP DP, embedding HP (figure 6) is the best choice for a ViT"
        yield claim(text, one.speedup(FIGURE_6, best), f"{{}}x of {best}", 1.0)


def of_accuracies(one: Measured) -> Iterator[Claim]:
    """Yield the claims on accuracy."""
    if not one.accuracy:
        return
    runs = min(map(len, one.accuracy.values()))
    epochs = max(len(run.epochs) for of in one.accuracy.values() for run in of)
    obtained = f"{runs} run(s) of {epochs} epoch(s) of each on {one.ranks} ranks"
    tested = "; two one-sided t-tests at 5 % show it, the whole interval contradicts it"
    for strategy in one.accuracy:
        if strategy == SINGLE:
            continue
        apart = one.points_apart(strategy)
        verdict = SHOWN if one.is_equivalent(strategy) else NOT_SHOWN
        if apart.low is not None and apart.high is not None:
            is_outside = apart.low > POINTS or apart.high < -POINTS
            verdict = CONTRADICTED if is_outside else verdict
        yield Claim(
            f"final accuracies are within {POINTS:g} points of one GPU's",
            one.model,
            f"{strategy}: {number(apart, '+.2f')} points",
            verdict,
            obtained + tested,
        )
    if ADAPTIVE in one.accuracy and epochs:
        means = {
            name: [
                float(np.mean([100 * (epoch.accuracy or 0.0) for epoch in run.epochs]))
                for run in one.accuracy[name]
            ]
            for name in (ADAPTIVE, SINGLE)
        }
        gain = difference(means[ADAPTIVE], means[SINGLE])
        yield Claim(
            "adaptive converges faster",
            one.model,
            f"{number(gain, '+.2f')} points from one rank, mean over all epochs",
            verdict_of(gain, 0.0),
            f"{obtained}; all strategies see the same samples in the same order",
        )


def of_sizes(measured: Sequence[Measured]) -> Iterator[Claim]:
    """Yield the claim that adaptive gains more for the larger of two models of a family."""
    by_name = {(one.model, one.ranks): one for one in measured}
    for small, large in FAMILIES:
        for ranks in sorted({one.ranks for one in measured}):
            pair = [by_name.get((name, ranks)) for name in (large, small)]
            gains = [
                [one.hours(DP), one.hours(ADAPTIVE)]
                for one in pair
                if one is not None and {DP, ADAPTIVE} <= one.timed.keys()
            ]
            if len(gains) < 2:
                continue
            larger = growth(*gains)
            yield Claim(
                "the gain of adaptive over DP grows with the size of the model",
                f"{small}, {large}",
                f"{number(larger, '.2f')} times the gain",
                verdict_of(larger, 1.0),
                f"measured on {ranks} ranks",
            )


def of_predictions(predictions: Sequence[Prediction]) -> Iterator[Claim]:
    """Yield the claims on several numbers of GPUs, from predictions, which have no interval."""
    obtained = f"predicted for up to {GPUS} V100, {EPOCHS} epochs"
    for one in predictions:
        speed: Mapping[str, Mapping[int, float]] = one.speedups

        def claim(text: str, result: str, holds: bool, model: str = one.model) -> Claim:
            agrees = "agrees" if holds else "disagrees"
            return Claim(text, model, result, f"{NOT_SHOWN} (a prediction {agrees})", obtained)

        for (fast, slow), (text, sizes) in SIZED.items():
            least = next(size for name, size in sizes.items() if one.model.startswith(name))
            times = speed[fast][GPUS] / (1.0 if slow == SINGLE else speed[slow][GPUS])
            yield claim(text, f"{times:.2f}x", times >= least)
        part = speed[DP][NEAR_LINEAR_RANKS] / NEAR_LINEAR_RANKS
        text = f"DP is near-linear (at least {NEAR_LINEAR:.0%} of it) up to 4 GPUs"
        yield claim(text, f"{part:.2f} of linear on 4", part >= NEAR_LINEAR)
        kept = {name: speed[name][GPUS] / speed[name][2] / (GPUS / 2) for name in (DP, MP)}
        yield claim(
            "MP scales more steadily than DP",
            f"from 2 to 8: MP keeps {kept[MP]:.2f} of its efficiency, DP {kept[DP]:.2f}",
            kept[MP] > kept[DP],
        )
        gains = [speed[ADAPTIVE][ranks] / speed[DP][ranks] for ranks in (2, 4, GPUS)]
        yield claim(
            "the gain of adaptive over DP grows with the number of GPUs",
            "on 2, 4 and 8: " + ", ".join(f"{gain:.2f}x" for gain in gains),
            gains[0] < gains[-1],
        )
