"""Pictures of the study of all-reduces, in the style of the other reports."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot

from hvdtrain.study.collectives.cells import LIBRARIES
from hvdtrain.study.collectives.results import Group, Steps, Sums
from hvdtrain.study.plots import COLOURS, HEIGHT, MARKERS, STYLE, WIDTH, save
from hvdtrain.study.statistics import median


def draw_group(group: Group, names: Sequence[str], to: Path) -> None:
    """Draw seconds against bytes: medians with intervals, and the textbook's lines, dashed.

    Args:
        names: all algorithms of the study, so that each has one colour in all pictures.

    Raises:
        DataError: if it cannot be written.
    """
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(WIDTH, 1.2 * HEIGHT))
        for name, sums in group.sums.items():
            place = list(names).index(name)
            colour = COLOURS[place % len(COLOURS)]
            _points(axes, sums, name, colour, MARKERS[place % len(MARKERS)])
            if (textbook := group.textbook(name)) is not None:
                milliseconds = [1e3 * value for value in textbook.values()]
                axes.plot(list(textbook), milliseconds, "--", color=colour, linewidth=0.7)
        axes.set(xscale="log", yscale="log")
        axes.set_xlabel("bytes")
        axes.set_ylabel("milliseconds per all-reduce")
        axes.set_title(group.title)
        axes.legend()
        save(figure, to)


def _points(axes: Any, sums: Sums, label: str, colour: str, marker: str) -> None:
    values = [median(list(sums.seconds[size])) for size in sums.medians]
    ends = [
        [1e3 * (value.value - (value.low or value.value)) for value in values],
        [1e3 * ((value.high or value.value) - value.value) for value in values],
    ]
    middle = [1e3 * value.value for value in values]
    style: Any = {"color": colour, "marker": marker, "capsize": 2, "markersize": 3}
    axes.errorbar(list(sums.medians), middle, yerr=ends, label=label, linewidth=0.9, **style)


def draw_steps(steps: Sequence[Steps], to: Path) -> None:
    """Draw measured and predicted milliseconds per step, a pair of bars per arm.

    Raises:
        DataError: if it cannot be written.
    """
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(WIDTH, 0.6 + 0.28 * len(steps)))
        rows = np.arange(len(steps))
        measured = [1e3 * median(item.measured).value for item in steps]
        predicted = [1e3 * item.predicted(lambda one: one.step).value for item in steps]
        axes.barh(rows - 0.2, measured, 0.38, color=COLOURS[0], label="measured")
        axes.barh(rows + 0.2, predicted, 0.38, color=COLOURS[4], label="predicted")
        names = [
            f"{LIBRARIES[item.arm.engine]}, {item.arm.algorithm}, {item.arm.ranks}"
            for item in steps
        ]
        axes.set_yticks(rows, names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("milliseconds per step")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
        save(figure, to)
