"""Pictures of plans: which rank computes what, and predictions beside measurements."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.patches import Patch, Rectangle

from hvdtrain.plan.plan import Plan, labels
from hvdtrain.study.plots import COLOURS, HEIGHT, MARKERS, STYLE, WIDTH, save

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


def draw_predictions(pairs: Mapping[str, Sequence[tuple[float, float]]], to: Path) -> None:
    """Draw predicted against measured seconds per step, by model.

    On the dashed line prediction and measurement are equal.

    Args:
        pairs: (predicted, measured) seconds by model.

    Raises:
        DataError: if the file cannot be written.
    """
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(WIDTH, HEIGHT))
        everything = [value for points in pairs.values() for pair in points for value in pair]
        ends = [0.8 * min(everything), 1.25 * max(everything)]
        axes.plot(ends, ends, "--", color="grey", linewidth=0.8)
        for place, (name, points) in enumerate(pairs.items()):
            predicted, measured = zip(*points, strict=True)
            style: Any = {"color": COLOURS[place % len(COLOURS)], "label": name}
            axes.plot(measured, predicted, MARKERS[place % len(MARKERS)], **style)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axes.set_xlabel("measured seconds per step")
        axes.set_ylabel("predicted seconds per step")
        axes.legend()
        save(figure, to)
