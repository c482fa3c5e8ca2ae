"""Abdulkarim et al., "Optimizing Training Time in Deep Learning Models Using Distributed Computing
Techniques", AJEST 5(1), 2026, doi 10.55145/ajest.2026.05.01.009, on this machine: table 2, figures
4 and 5, and what became of its claim.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain import files
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import read_index
from hvdtrain.errors import DataError, UsageError
from hvdtrain.study import plots
from hvdtrain.study.report import number, origin
from hvdtrain.study.reproduction import Arm, run_all
from hvdtrain.study.results import Result, read
from hvdtrain.study.statistics import Estimate, difference, median, ratio

SINGLE, MIRRORED, KERAS = "single", "mirrored", "horovod-tensorflow"
SINGLE_TORCH, TORCH = "single-torch", "horovod-torch"
BASES = {MIRRORED: SINGLE, KERAS: SINGLE, TORCH: SINGLE_TORCH}  # of the same framework
# Seconds, and accuracy on the test images.
PAPER = {SINGLE: (156.63, 0.6892), MIRRORED: (126.12, 0.6907)}
CLAIMED = 0.195  # less time
POINT = 0.01
SMALL_BATCH, SMALL_STEPS = 2, 500  # a step of which is hardly any computing


def arms(data: str, epochs: int, ranks: int) -> list[Arm]:
    """The paper's two arms, Horovod's, and its base in PyTorch; the paper's settings, on CPUs."""
    base = TrainConfig(
        model="cnn",
        data=data,
        epochs=epochs,
        batch_size=64,
        optimizer="adam",
        lr=0.001,
        normalise="unit",
        holdout=0.2,
        device="cpu",
    )
    keras = replace(base, framework="tensorflow")
    return [
        Arm(SINGLE, "single device, TensorFlow", 1, replace(keras, plan="single")),
        Arm(MIRRORED, "MirroredStrategy", 1, replace(keras, plan=f"mirrored:{ranks}")),
        Arm(KERAS, "Horovod, TensorFlow", ranks, replace(keras, plan="dp")),
        Arm(SINGLE_TORCH, "single device, PyTorch", 1, replace(base, plan="single")),
        Arm(TORCH, "Horovod, PyTorch", ranks, replace(base, plan="dp")),
    ]


def small_arms(data: str, ranks: int) -> list[Arm]:
    """Single device and mirrors on two images a step: what a step costs whatever is computed."""
    return [
        Arm(
            f"small-{one.key}",
            f"{one.name}, {SMALL_BATCH} images a step",
            one.ranks,
            replace(one.config, batch_size=SMALL_BATCH, epochs=None, max_steps=SMALL_STEPS),
        )
        for one in arms(data, 1, ranks)
        if one.key in (SINGLE, MIRRORED)
    ]


def reproduce(
    data: str, to: str, epochs: int, repeats: int, ranks: int, say: Callable[[str], object]
) -> Path:
    """Make all runs, and write what came of them; the path of `report.md`.

    Raises:
        UsageError: for numbers that make no comparison.
        DataError: if there is no data set.
        HvdtrainError: as a run that failed.
    """
    for option, value, least in (("--epochs", epochs, 1), ("--repeats", repeats, 1)):
        if value < least:
            raise UsageError(f"{option} must be at least {least}, not {value}")
    if ranks < 2:
        raise UsageError(f"--ranks must be at least 2, not {ranks}: one rank is the base")
    read_index(data)
    folder = Path(to)
    compared = arms(data, epochs, ranks)
    made = run_all([*compared, *small_arms(data, ranks)], repeats, folder, say)
    results = {key: [read(path) for path in sorted(paths)] for key, paths in made.items()}
    return write(folder, {arm.key: arm.name for arm in compared}, results)


def write(folder: Path, names: Mapping[str, str], results: Mapping[str, list[Result]]) -> Path:
    """Write table, pictures and words into the folder; the path of `report.md`.

    Args:
        names: of the arms that are compared, by their keys.
    """
    main = {key: results[key] for key in names}
    curves = {names[key]: runs for key, runs in main.items()}
    plots.draw_by_epoch(curves, "accuracy", "accuracy on the test images", folder / "figure4.png")
    plots.draw_by_epoch(curves, "loss", "loss on the test images", folder / "figure5.png")
    text = "\n\n".join(
        [
            "# Paper A on this machine",
            "Abdulkarim et al., AJEST 5(1), 2026, doi 10.55145/ajest.2026.05.01.009.",
            origin([run for runs in main.values() for run in runs]),
            "## Table 2",
            _table(main, names),
            "Seconds are those from the first step to the end, the evaluation of each epoch "
            "included, without start-up. Medians of the repeats, in brackets 95 % bootstrap "
            "intervals, which with few repeats are no wider than the repeats' range.",
            "![Accuracy](figure4.png)\n\n*Figure 4: accuracy on the test images by epoch; medians "
            "and ranges of repeats.*",
            "![Loss](figure5.png)\n\n*Figure 5: loss on the test images by epoch.*",
            "## Verdict",
            verdict(main, names),
            "## What MirroredStrategy costs",
            cost_of_mirrors(results),
        ]
    )
    files.write_text(folder / "report.md", text + "\n", "the report", DataError)
    return folder / "report.md"


def _table(main: Mapping[str, list[Result]], names: Mapping[str, str]) -> str:
    heads = [
        "arm",
        "ranks x threads",
        "seconds",
        "time against single device",
        "images/s of steps",
    ]
    heads += ["test accuracy", "paper: seconds", "paper: accuracy"]
    rows = [heads, ["---"] * len(heads)]
    for key, runs in main.items():
        first = runs[0]
        published = PAPER.get(key)
        rows.append(
            [
                names[key],
                f"{first.ranks} x {first.threads}",
                number(median([run.seconds for run in runs]), ".1f"),
                number(_time_ratio(main, key), ".3f") if key in BASES else "1",
                number(median([run.images_per_second for run in runs]), ",.0f"),
                number(median(_accuracies(runs)), ".4f"),
                f"{published[0]:.2f}" if published else "-",
                f"{published[1]:.4f}" if published else "-",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _time_ratio(main: Mapping[str, list[Result]], key: str) -> Estimate:
    own, base = ([run.seconds for run in main[each]] for each in (key, BASES[key]))
    return ratio(own, base)


def _accuracies(runs: Sequence[Result]) -> list[float]:
    return [run.accuracy for run in runs if run.accuracy is not None]


def verdict(main: Mapping[str, list[Result]], names: Mapping[str, str]) -> str:
    """What became here of the claim: less time, and the same accuracy within a point."""
    parts = [
        f"The paper found that distribution took {CLAIMED:.1%} less time, at an accuracy within "
        "one point."
    ]
    for key, base in BASES.items():
        found = _time_ratio(main, key)
        lost = difference(_accuracies(main[key]), _accuracies(main[base]))
        parts.append(
            f"- {names[key]} {_less_time(found)}; its accuracy is {_points(lost)}. "
            f"{_holds(found, _is_within(lost))}"
        )
    return "\n".join(parts)


def _points(lost: Estimate) -> str:
    said = f"{100 * lost.value:+.2f} points from the single device's"
    if lost.low is not None and lost.high is not None:
        said += f" ({100 * lost.low:+.2f} to {100 * lost.high:+.2f})"
    return f"{said}, {'within' if _is_within(lost) else 'NOT within'} one point"


def _is_within(lost: Estimate) -> bool:
    ends = (lost.value, lost.low, lost.high)
    return all(abs(end) <= POINT for end in ends if end is not None)


def _less_time(found: Estimate) -> str:
    def words(value: float) -> str:
        return f"{abs(1 - value):.1%} {'less' if value < 1 else 'more'}"

    said = f"took {words(found.value)} time than the single device"
    if found.low is None or found.high is None:
        return f"{said} (one run of each: no interval)"
    return f"{said} ({words(found.low)} to {words(found.high)})"


def _holds(found: Estimate, within: bool) -> str:
    if found.low is None or found.high is None:
        return "Whether the claim holds cannot be told without repeats."
    if found.low <= 1 <= found.high:
        return "Whether it is faster at all is within the noise, so the claim is not confirmed."
    if found.low > 1:
        return "The claim does not hold here."
    size = (
        "as much as the paper's"
        if found.low <= 1 - CLAIMED <= found.high
        else ("more than the paper's" if found.high < 1 - CLAIMED else "less than the paper's")
    )
    return f"The claim holds here{'' if within else ' for the time alone'}; the gain is {size}."


def cost_of_mirrors(results: Mapping[str, list[Result]]) -> str:
    """Where the time of a mirrored step goes that a single device's does not have."""
    whole, small = (
        {
            key: 1e3 * median([run.step_seconds for run in results[f"{prefix}{key}"]]).value
            for key in (SINGLE, MIRRORED)
        }
        for prefix in ("", "small-")
    )
    more, fixed = whole[MIRRORED] - whole[SINGLE], small[MIRRORED] - small[SINGLE]
    return (
        f"A step on 64 images takes {whole[SINGLE]:.2f} ms on the single device and "
        f"{whole[MIRRORED]:.2f} ms on the mirrors; a step on {SMALL_BATCH}, which is hardly any "
        f"computing, {small[SINGLE]:.2f} and {small[MIRRORED]:.2f} ms. So the mirrors add "
        f"{fixed:.2f} ms to each step whatever it computes, and {more - fixed:+.2f} ms that "
        "depend on the images. The fixed part is the sum of the gradients over the mirrors and "
        "the update, which every mirror makes of its own copy of weights and optimizer with its "
        "part of the threads, where a single device makes it once with all of them: "
        "`benchmarks/mirrored.py` measures each by itself. The other part is forward and "
        "backward, which a single device spreads over the cores operation by operation and "
        "mirrors by parts of the batch: on the cores of one processor mirrors add no computing "
        "power."
    )
