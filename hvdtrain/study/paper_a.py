"""Reproduce paper A on this machine: its table 2, figures 4 and 5, and a verdict on its claim.

Paper A: Abdulkarim et al., "Optimizing Training Time in Deep Learning Models Using Distributed
Computing Techniques", AJEST 5(1), 2026, doi 10.55145/ajest.2026.05.01.009.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import read_index
from hvdtrain.errors import DataError, RankError, UsageError
from hvdtrain.host import files
from hvdtrain.study import plots
from hvdtrain.study.fits import EPOCHS
from hvdtrain.study.laws import (
    Estimate,
    difference,
    equivalence,
    is_shown,
    markdown_table,
    median,
    number,
    ratio,
)
from hvdtrain.study.report import origin
from hvdtrain.study.results import Result, read
from hvdtrain.study.runs import Arm, make_folder, run_all

SINGLE, MIRRORED, KERAS = "single", "mirrored", "horovod-tensorflow"
ONE_MIRROR = "one-mirror"
SINGLE_TORCH, TORCH = "single-torch", "horovod-torch"
# In the same framework.
BASES = {MIRRORED: SINGLE, ONE_MIRROR: SINGLE, KERAS: SINGLE, TORCH: SINGLE_TORCH}
# Published seconds, and accuracy on the test images.
PAPER = {SINGLE: (156.63, 0.6892), MIRRORED: (126.12, 0.6907)}
CLAIMED = 0.195  # the claimed saving of time
POINT = 0.01  # a percentage point of accuracy
SMALL_BATCH, SMALL_STEPS = 2, 500  # such a step computes hardly anything
ORDERS = (("single", "single"), ("single", "mirrored"))  # of two fits in a process
PAPER_EPOCHS = 10
Fits = Mapping[tuple[str, str], list[list[list[float]]]]  # seconds by order, run, fit and epoch
CONTRADICTIONS = (
    "Section 3.1 holds out 20 % of the training images for validation; section 3.4 takes the "
    '10,000 test images for the "validation accuracy". Both are in table 2 above.',
    "The captions of the figures have seven epochs, the text has ten.",
    "The paper compares one run of each arm, and gives no interval.",
    "The distributed arm is `MirroredStrategy`, which takes all CPUs of a machine for one device "
    "(TensorFlow's guide to distributed training); the paper names no logical devices, so it "
    "probably had one replica, which sums nothing.",
)


def arms(data: str, epochs: int, ranks: int) -> list[Arm]:
    """Return the arms, with the paper's settings.

    They are the paper's two, one mirror alone, and Horovod in both frameworks.
    """
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
        Arm(ONE_MIRROR, "MirroredStrategy, 1 device", 1, replace(keras, plan="mirrored:1")),
        Arm(KERAS, "Horovod, TensorFlow", ranks, replace(keras, plan="dp")),
        Arm(SINGLE_TORCH, "single device, PyTorch", 1, replace(base, plan="single")),
        Arm(TORCH, "Horovod, PyTorch", ranks, replace(base, plan="dp")),
    ]


def small_arms(data: str, ranks: int) -> list[Arm]:
    """Return single device and mirrors with two images per step, for the fixed cost of a step."""
    return [
        Arm(
            f"small-{arm.key}",
            f"{arm.name}, {SMALL_BATCH} images per step",
            arm.ranks,
            replace(arm.config, batch_size=SMALL_BATCH, epochs=None, max_steps=SMALL_STEPS),
        )
        for arm in arms(data, 1, ranks)
        if arm.key in (SINGLE, MIRRORED)
    ]


def reproduce(
    data: str, to: str, epochs: int, repeats: int, ranks: int, say: Callable[[str], object]
) -> Path:
    """Train all runs and write the report; return the path of `report.md`.

    Args:
        data: folder of the packed data set.
        to: folder for runs and report.
        epochs: epochs per run.
        repeats: runs per arm.
        ranks: ranks of the distributed arms.
        say: called with each line of progress.

    Raises:
        UsageError: if epochs, repeats or ranks do not allow a comparison.
        DataError: if there is no data set.
        HvdtrainError: the error of a run that failed.
    """
    for option, value, least in (("--epochs", epochs, 1), ("--repeats", repeats, 1)):
        if value < least:
            raise UsageError(f"{option} must be at least {least}, not {value}")
    if ranks < 2:
        raise UsageError(f"--ranks must be at least 2, not {ranks}: one rank is the baseline")
    read_index(data)
    folder = Path(to)
    compared = arms(data, epochs, ranks)
    folders = run_all([*compared, *small_arms(data, ranks)], repeats, folder, say)
    results = {key: [read(path) for path in sorted(paths)] for key, paths in folders.items()}
    fits = run_fits(data, repeats, folder / "fits", say)
    return write(folder, {arm.key: arm.name for arm in compared}, results, fits)


def run_fits(data: str, repeats: int, folder: Path, say: Callable[[str], object]) -> Fits:
    """Make two fits in a process, in each order, as often as there are repeats; keep the seconds.

    Raises:
        RankError: if a process fails.
    """
    make_folder(folder)
    index_hash = read_index(data).hash
    fits: dict[tuple[str, str], list[list[list[float]]]] = {order: [] for order in ORDERS}
    for seed in range(repeats):
        for order in ORDERS:
            path = folder / f"{'-'.join(order)}-{seed}-{EPOCHS}-{index_hash[:8]}.json"
            if not path.exists():
                say(f"two fits in a process: {', then '.join(order)}, seed {seed}")
                words = [sys.executable, "-m", "hvdtrain.study.fits", data, str(seed), *order]
                done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
                if done.returncode:
                    raise RankError(f"{' '.join(words)} failed with exit code {done.returncode}")
                text = done.stdout.splitlines()[-1]
                files.write_text(path, text + "\n", "the seconds of fits", DataError)
            fits[order].append(json.loads(path.read_text()))
    return fits


def write(
    folder: Path, names: Mapping[str, str], results: Mapping[str, list[Result]], fits: Fits
) -> Path:
    """Write the report with its figures into the folder; return the path of `report.md`.

    Args:
        names: names of the compared arms, by key.
        results: finished runs of all arms, by key.
        fits: see `run_fits`.
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
            "Seconds are counted from the first step to the end, with the evaluation of each "
            "epoch, without start-up. As in the paper, pixels are divided by 255 and 20 % of the "
            "training images are held out: validation accuracy is that on them, test accuracy "
            "that on the test images, after the last epoch. Values are medians of the repeats, "
            "with 95 % intervals in brackets (Student's t, of times on their logarithms).",
            "![Accuracy](figure4.png)\n\n*Figure 4: accuracy on the test images by epoch; medians "
            "and ranges of repeats.*",
            "![Loss](figure5.png)\n\n*Figure 5: loss on the test images by epoch.*",
            "## Verdict",
            verdict(main, names),
            "## What could explain the paper's saving",
            explanations(main, fits),
            "## Where the paper disagrees with itself",
            "\n".join(f"- {line}" for line in CONTRADICTIONS),
            "## What MirroredStrategy costs",
            cost_of_mirrors(results),
        ]
    )
    files.write_text(folder / "report.md", text + "\n", "the report", DataError)
    return folder / "report.md"


def _table(main: Mapping[str, list[Result]], names: Mapping[str, str]) -> str:
    rows = []
    for key, runs in main.items():
        first = runs[0]
        published = PAPER.get(key)
        rows.append(
            {
                "arm": names[key],
                "ranks x threads": f"{first.ranks} x {first.threads}",
                "seconds": number(median([run.seconds for run in runs]), ".1f"),
                "time against single device": (
                    number(_time_ratio(main, key), ".3f") if key in BASES else "1"
                ),
                "images/s of steps": number(
                    median([run.images_per_second for run in runs]), ",.0f"
                ),
                **{
                    name: number(median(values), ".4f") if values else "-"
                    for name, values in (
                        ("validation accuracy", _known(run.validation_accuracy for run in runs)),
                        ("test accuracy", _known(run.accuracy for run in runs)),
                    )
                },
                "paper: seconds": f"{published[0]:.2f}" if published else "-",
                "paper: accuracy": f"{published[1]:.4f}" if published else "-",
            }
        )
    return markdown_table(rows)


def _time_ratio(main: Mapping[str, list[Result]], key: str) -> Estimate:
    arm, base = ([run.seconds for run in main[name]] for name in (key, BASES[key]))
    return ratio(arm, base)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def verdict(main: Mapping[str, list[Result]], names: Mapping[str, str]) -> str:
    """Return the verdict on the claim: less time, at the same accuracy within a point."""
    parts = [
        f"The paper reports that distribution took {CLAIMED:.1%} less time, at an accuracy within "
        "one point."
    ]
    for key, base in BASES.items():
        time = _time_ratio(main, key)
        accuracies = [_known(run.accuracy for run in main[name]) for name in (key, base)]
        p_value = equivalence(accuracies[0], accuracies[1], POINT)
        apart = difference(accuracies[0], accuracies[1])
        points = f"{100 * apart.value:+.2f} points from the single device's"
        if apart.low is not None and apart.high is not None:
            points += f" ({100 * apart.low:+.2f} to {100 * apart.high:+.2f})"
        shown = "shown" if is_shown(p_value) else "not shown"
        why = ": that needs repeats" if p_value is None else f" (p = {p_value:.3f})"
        parts.append(
            f"- {names[key]} {_less_time(time)}; its accuracy is {points}. "
            f"That both are within one point is {shown}{why}. "
            f"{_conclusion(time, is_shown(p_value))}"
        )
    return "\n".join(parts)


def _less_time(time: Estimate) -> str:
    def words(value: float) -> str:
        return f"{abs(1 - value):.1%} {'less' if value < 1 else 'more'}"

    text = f"took {words(time.value)} time than the single device"
    if time.low is None or time.high is None:
        return f"{text} (one run of each: no interval)"
    return f"{text} ({words(time.low)} to {words(time.high)})"


def _conclusion(time: Estimate, is_equivalent: bool) -> str:
    if time.low is None or time.high is None:
        return "Without repeats the claim can be neither confirmed nor refuted."
    if time.low <= 1 <= time.high:
        return "The difference in time is within the noise, so the claim is not confirmed."
    if time.low > 1:
        return "The claim does not hold here."
    size = "as much as" if time.low <= 1 - CLAIMED <= time.high else "less than"
    if time.high < 1 - CLAIMED:
        size = "more than"
    alone = "" if is_equivalent else " for the time alone"
    return f"The claim holds here{alone}; the gain is {size} the paper's."


def explanations(main: Mapping[str, list[Result]], fits: Fits) -> str:
    """Return a table of what could explain the claimed saving, each with a verdict."""
    rows = []

    def add(what: str, mirrored: Sequence[float], single: Sequence[float]) -> None:
        saved = ratio(mirrored, single).through(lambda value: 100 * (1 - value))
        rows.append({"what": what, "time saved, %": number(saved, "+.1f")} | _judged(saved))

    for key, name in ((MIRRORED, "two devices"), (ONE_MIRROR, "one device, as TensorFlow has it")):
        arm, base = main[key], main[SINGLE]
        add(f"{name}: from the first step on", *([r.seconds for r in one] for one in (arm, base)))
        whole = ([run.seconds + run.startup_seconds for run in one] for one in (arm, base))
        add(f"{name}: start-up included", *whole)
        steady = [[_without_first(run) for run in one] for one in (arm, base)]
        if all(seconds for one in steady for seconds in one):
            add(f"{name}: without the first epoch, which traces", *steady)
    for (first, second), runs in fits.items():
        seconds = [
            [one[fit][0] + (PAPER_EPOCHS - 1) * one[fit][-1] for one in runs] for fit in (0, 1)
        ]
        what = f"the second fit in a process ({second}) against the first ({first})"
        add(f"{what}, plain Keras, {PAPER_EPOCHS} epochs extrapolated", seconds[1], seconds[0])
    return (
        f"The paper's {CLAIMED:.1%} are one run of each arm. What could have made them, and what "
        "it saves here:\n\n" + markdown_table(rows)
    )


def _without_first(run: Result) -> float:
    """Return the seconds of all epochs but the first; 0 if that is not known."""
    ends = [epoch.seconds for epoch in run.epochs]
    if len(ends) < 2 or ends[0] is None or ends[-1] is None:
        return 0.0
    return ends[-1] - ends[0]


def _judged(saved: Estimate) -> dict[str, str]:
    if saved.low is None or saved.high is None:
        return {"does it explain the saving?": "not shown (one run of each)"}
    claimed = 100 * CLAIMED
    if saved.low >= claimed:
        verdict = "shown"
    elif saved.high < 0:
        verdict = "contradicted: it takes longer"
    elif saved.high < claimed:
        verdict = "a part of it" if saved.low > 0 else "contradicted: too little"
    else:
        verdict = "possible" if saved.low > 0 else "not shown"
    return {"does it explain the saving?": verdict}


def cost_of_mirrors(results: Mapping[str, list[Result]]) -> str:
    """Return a paragraph on the extra time of a mirrored step over a single device's step."""
    whole, small = (
        {
            key: 1e3 * median([run.step_seconds for run in results[f"{prefix}{key}"]]).value
            for key in (SINGLE, MIRRORED)
        }
        for prefix in ("", "small-")
    )
    extra, fixed = whole[MIRRORED] - whole[SINGLE], small[MIRRORED] - small[SINGLE]
    return (
        f"A step on 64 images takes {whole[SINGLE]:.2f} ms on the single device and "
        f"{whole[MIRRORED]:.2f} ms on the mirrors. A step on {SMALL_BATCH} images, which computes "
        f"hardly anything, takes {small[SINGLE]:.2f} and {small[MIRRORED]:.2f} ms. So the mirrors "
        f"add a fixed {fixed:.2f} ms to each step, and {extra - fixed:+.2f} ms that depend on the "
        "images. The fixed part is the sum of the gradients over the mirrors, and the update: "
        "each mirror updates its own copy of weights and optimizer state with its part of the "
        "threads, and a single device updates one copy with all threads. "
        "`benchmarks/mirrored.py` measures both. The other part is forward and backward: a single "
        "device spreads each operation over the cores, and mirrors split the batch. On the cores "
        "of one processor mirrors add no computing power."
    )
