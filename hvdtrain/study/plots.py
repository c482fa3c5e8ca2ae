"""Pictures of a report and of plans, each for one column of a paper (3.4 inches wide)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from hvdtrain.errors import DataError
from hvdtrain.host import files
from hvdtrain.plan.plan import Plan, labels
from hvdtrain.study.laws import Estimate, Fit
from hvdtrain.study.results import Result
from hvdtrain.study.series import Lost, Series

matplotlib.use("Agg")

WIDTH, HEIGHT, DPI = 3.4, 2.55, 300
# Okabe and Ito's palette, which readers with colour blindness can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*"
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "savefig.dpi": DPI,
    "savefig.bbox": "tight",
}
# A report made twice holds the same bytes.
NO_DATE: dict[str, dict[str, None]] = {"png": {}, "pdf": {"CreationDate": None}}
PARTS = {
    "ideal": "ideal",
    "computing": "slower computing",
    "communication": "communication",
    "imbalance": "imbalance",
    "bubble": "pipeline bubble",
    "data": "data",
}


def draw(all_series: Sequence[Series], folder: Path) -> dict[str, str]:
    """Draw all pictures into the folder, as PNG and as PDF; return captions by name of the PNG.

    Raises:
        DataError: if one cannot be written.
    """
    has_law = any(series.laws.law and series.laws.law.values for series in all_series)
    law = "; dotted: the law, with its interval" if has_law else ""
    with pyplot.rc_context(STYLE):
        pictures: dict[str, tuple[str, Callable[..., bool]]] = {
            "speedup.png": (f"Speed-up over one rank; dashed: ideal{law}.", _speedup),
            "efficiency.png": ("Efficiency; dashed: ideal.", _efficiency),
            "time.png": ("Time of the steps by cause, by number of ranks.", _time),
            "accuracy.png": (
                "Test accuracy by epoch, medians and ranges of repeats.",
                partial(_curves, name="accuracy", label="test accuracy"),
            ),
            "loss.png": (
                "Test loss by epoch, medians and ranges of repeats.",
                partial(_curves, name="loss", label="test loss"),
            ),
            "train_loss.png": (
                "Training loss by epoch, medians and ranges.",
                partial(_curves, name="train_loss", label="training loss"),
            ),
            "memory.png": ("Peak memory of the rank that uses most.", _memory),
        }
        captions = {}
        for name, (caption, drawing) in pictures.items():
            figure, axes = pyplot.subplots(figsize=(WIDTH, HEIGHT))
            if drawing(axes, all_series):
                save(figure, folder / name, (folder / name).with_suffix(".pdf"))
                captions[name] = caption
            pyplot.close(figure)
    return captions


def _speedup(axes: Any, all_series: Sequence[Series]) -> bool:
    most = max(size.ranks for series in all_series for size in series.sizes)
    axes.plot([1, most], [1, most], "--", color="grey", linewidth=0.8, label="ideal")
    for place, series in enumerate(all_series):
        ranks = [size.ranks for size in series.sizes]
        colour = COLOURS[place % len(COLOURS)]
        speedups = [size.speedup for size in series.sizes]
        _points(axes, ranks, speedups, place, _label(series, all_series))
        law = series.laws.law  # one that does not describe the runs is only in the text
        if law is not None and law.values:
            along = np.geomspace(1, most, 100)
            _law(axes, law, along, colour)
    _by_ranks(axes, all_series, "speed-up")
    _show_medians(axes, all_series, "speedup", most)
    axes.legend()
    return True


def _show_medians(axes: Any, all_series: Sequence[Series], name: str, ideal: float) -> None:
    """Let the axis fit the medians: an interval of noisy repeats would swamp them, and is cut."""
    values = [getattr(size, name).value for series in all_series for size in series.sizes]
    top = 1.5 * max(ideal, *values)
    axes.set_ylim(0, min(axes.get_ylim()[1], top))


def _law(axes: Any, law: Fit, along: NDArray[np.float64], colour: str) -> None:
    """Draw the speed-up that a law predicts, with its interval if it is known."""
    predicted = [law.predicted(ranks, over=1) for ranks in along]
    middle = [item.value for item in predicted]
    axes.plot(along, middle, ":", color=colour, linewidth=0.9, label=law.name)
    if law.has_repeats:
        low, high = [item.low for item in predicted], [item.high for item in predicted]
        axes.fill_between(along, low, high, color=colour, alpha=0.15, linewidth=0)


def _efficiency(axes: Any, all_series: Sequence[Series]) -> bool:
    axes.axhline(1, linestyle="--", color="grey", linewidth=0.8)
    for place, series in enumerate(all_series):
        ranks = [size.ranks for size in series.sizes]
        efficiencies = [size.efficiency for size in series.sizes]
        _points(axes, ranks, efficiencies, place, _label(series, all_series))
    axes.set_ylim(0, max(1.1, axes.get_ylim()[1]))
    _by_ranks(axes, all_series, "efficiency")
    _show_medians(axes, all_series, "efficiency", 1.1)
    if len(all_series) > 1:
        axes.legend()
    return True


def _time(axes: Any, all_series: Sequence[Series]) -> bool:
    sizes = [(series, size) for series in all_series for size in series.sizes]
    places = np.arange(len(sizes))
    below = np.zeros(len(sizes))
    for number, (name, label) in enumerate(PARTS.items()):
        values = np.array([max(_part(size.lost, name), 0.0) for _, size in sizes])
        if values.max() > 0.005 * max(size.lost.ideal for _, size in sizes):
            axes.bar(places, values, 0.7, bottom=below, label=label, color=COLOURS[number])
        below += values
    several = len(all_series) > 1
    ticks = [f"{size.ranks}\n{series.plan}" if several else size.ranks for series, size in sizes]
    axes.set_xticks(places, [str(tick).replace("$", r"\$") for tick in ticks])
    axes.set_xlabel("ranks")
    axes.set_ylabel("seconds of training")
    axes.grid(axis="x", visible=False)
    axes.set_ylim(top=1.25 * below.max())
    axes.legend(ncols=2, loc="upper right")
    return True


def _part(lost: Lost, name: str) -> float:
    """Return the seconds of a bar; computing that is faster than ideal shortens the ideal bar."""
    faster = min(lost.computing, 0.0) if name == "ideal" else 0.0
    return float(getattr(lost, name)) + faster


def draw_by_epoch(arms: Mapping[str, Sequence[Result]], name: str, label: str, to: Path) -> None:
    """Draw the `name` of each arm's runs by epoch: medians and ranges of the repeats.

    Args:
        arms: runs by the label of their curve.
        name: attribute of `Epoch`.
        label: label of the y axis.

    Raises:
        DataError: if it cannot be written.
    """
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(WIDTH, HEIGHT))
        _draw_curves(axes, arms, name, label)
        save(figure, to)


def save(figure: Any, *paths: Path) -> None:
    """Write a picture, as PDF into a file of that suffix and else as PNG, and close it.

    Raises:
        DataError: if it cannot be written.
    """
    try:
        for path in paths:
            kind = "pdf" if path.suffix == ".pdf" else "png"
            files.write_whole(path, partial(figure.savefig, format=kind, metadata=NO_DATE[kind]))
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def _curves(axes: Any, all_series: Sequence[Series], name: str, label: str) -> bool:
    curves: dict[str, Sequence[Result]] = {}
    for series in all_series:
        for size in series.sizes:
            words = f"{size.ranks} rank{'s' if size.ranks > 1 else ''}"
            if len(all_series) > 1:
                words += f", {_label(series, all_series)}"
            curves[words] = size.runs
    return _draw_curves(axes, curves, name, label)


def _draw_curves(axes: Any, curves: Mapping[str, Sequence[Result]], name: str, label: str) -> bool:
    drawn = 0
    for words, runs in curves.items():
        epochs = _by_epoch(runs, name)
        if not epochs:
            continue
        colour, marker = COLOURS[drawn % len(COLOURS)], MARKERS[drawn % len(MARKERS)]
        numbers = sorted(epochs)
        middle = [float(np.median(epochs[number])) for number in numbers]
        axes.plot(numbers, middle, marker=marker, color=colour, label=words)
        low, high = ([f(epochs[number]) for number in numbers] for f in (min, max))
        axes.fill_between(numbers, low, high, color=colour, alpha=0.15, linewidth=0)
        drawn += 1
    if not drawn:  # no epoch was evaluated
        return False
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
    axes.legend()
    return True


def _by_epoch(runs: Sequence[Result], name: str) -> dict[int, list[float]]:
    """Return the values of all repeats by epoch."""
    values: dict[int, list[float]] = {}
    for run in runs:
        for epoch in run.epochs:
            if (value := getattr(epoch, name)) is not None:
                values.setdefault(epoch.number, []).append(value)
    return values


def _memory(axes: Any, all_series: Sequence[Series]) -> bool:
    for place, series in enumerate(all_series):
        ranks = [size.ranks for size in series.sizes]
        peaks = [
            Estimate(float(np.median([run.peak_memory_bytes for run in size.runs])) / 2**30)
            for size in series.sizes
        ]
        _points(axes, ranks, peaks, place, _label(series, all_series))
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    _by_ranks(axes, all_series, "peak memory (GiB)")
    if len(all_series) > 1:
        axes.legend()
    return True


def _points(
    axes: Any, ranks: Sequence[int], values: Sequence[Estimate], place: int, label: str
) -> None:
    """Draw medians with intervals, without lines between the sizes."""
    below = [value.value - (value.value if value.low is None else value.low) for value in values]
    above = [(value.value if value.high is None else value.high) - value.value for value in values]
    axes.errorbar(
        ranks,
        [value.value for value in values],
        yerr=[below, above],
        fmt=MARKERS[place % len(MARKERS)],
        color=COLOURS[place % len(COLOURS)],
        capsize=2,
        label=label,
    )


def _by_ranks(axes: Any, all_series: Sequence[Series], label: str) -> None:
    ranks = sorted({size.ranks for series in all_series for size in series.sizes})
    if ranks[-1] > 8:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(number) for number in ranks])
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_ylabel(label)


def _label(series: Series, all_series: Sequence[Series]) -> str:
    """Return the settings in which a series differs from the others."""
    texts = {
        "model": series.model,
        "framework": series.framework,
        "plan": series.plan,
        "agreement": series.agreement,
        "precision": series.precision,
        "scaling": series.scaling,
        "batch_size": f"batch {series.batch_size}",
    }
    differing = [
        text
        for name, text in texts.items()
        if len({getattr(other, name) for other in all_series}) > 1
    ]
    return (", ".join(differing) or "measured").replace("$", r"\$")


MEANINGS = {
    "single": "on the one rank",
    "DP": "data parallel: on all ranks",
    "HP": "hybrid: on some",
    "MP": "model parallel: on one",
}
NARROW = 14  # components that fit into the width of one column of a paper
MOST_ROWS = 32  # ranks


def draw_strategies(plan: Plan, to: Path) -> None:
    """Draw which ranks hold each component, with its label: paper B's figure 6 for any plan.

    Raises:
        DataError: if the file cannot be written.
    """
    label_of = labels(plan)
    names = list(label_of)
    ranks = plan.ranks[:MOST_ROWS]
    width = WIDTH if len(names) <= NARROW else 2 * WIDTH
    height = 1.3 + 0.16 * len(ranks)
    with pyplot.rc_context(STYLE | {"axes.grid": False}):
        figure, axes = pyplot.subplots(figsize=(width, height))
        column = 0
        for stage in plan.stages:
            for name in stage.components:
                for rank, share in zip(stage.ranks, stage.shares, strict=True):
                    if rank in ranks:
                        part = share / sum(stage.shares) * len(stage.ranks)
                        _cell(axes, column, ranks.index(rank), label_of[name], part)
                column += 1
        axes.set_xlim(0, len(names))
        axes.set_ylim(len(ranks), 0)
        axes.set_xticks([place + 0.5 for place in range(len(names))], names, rotation=90)
        axes.set_yticks([place + 0.5 for place in range(len(ranks))], list(map(str, ranks)))
        axes.set_ylabel("rank" if len(ranks) == len(plan.ranks) else f"first {MOST_ROWS} ranks")
        axes.tick_params(length=0)
        used = [label for label in MEANINGS if label in label_of.values()]
        patches = [Patch(color=_colour(label), label=f"{MEANINGS[label]}") for label in used]
        axes.legend(handles=patches, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
        save(figure, to)


def _cell(axes: Any, column: int, row: int, label: str, part: float) -> None:
    """Draw one component on one rank; a smaller part of the batch is paler."""
    alpha = max(0.25, min(1.0, part))
    colour = _colour(label)
    axes.add_patch(Rectangle((column + 0.04, row + 0.06), 0.92, 0.88, color=colour, alpha=alpha))


def _colour(label: str) -> str:
    return COLOURS[list(MEANINGS).index(label)]
