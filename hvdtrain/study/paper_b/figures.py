"""Pictures in the form of paper B's figures 1 to 6, with its values as hollow marks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hvdtrain.study.paper_b.claims import GPUS, PUBLISHED, STRATEGIES, Published
from hvdtrain.study.paper_b.predicted import IN_SWEEP, Prediction
from hvdtrain.study.planplots import draw_strategies
from hvdtrain.study.plots import (
    COLOURS,
    HEIGHT,
    MARKERS,
    STYLE,
    WIDTH,
    draw_by_epoch,
    save,
)
from hvdtrain.study.results import Result

TRANSFORMER = "vit_b16"  # the model of figure 6
HATCH = "////"  # of predicted bars
PER_ROW = 2  # panels side by side
HOLLOW: Any = {
    "linestyle": "none",
    "marker": "D",
    "markersize": 5,
    "markerfacecolor": "none",
    "markeredgecolor": "black",
    "markeredgewidth": 1.0,
}
STYLE_HERE: Any = STYLE | {"hatch.linewidth": 0.5}


@dataclass(frozen=True)
class Measured:
    """The measurements of one strategy.

    Attributes:
        hours: of 100 epochs, extrapolated.
        communication: share of time, 0 to 1.
        memory_gb: peak memory of the rank that uses most, in 1e9 bytes.
    """

    hours: float
    communication: float
    memory_gb: float


@dataclass(frozen=True)
class Panel:
    """The bars of one model: values of all strategies, predicted or measured."""

    model: str
    values: Mapping[str, Measured]
    is_predicted: bool

    @property
    def title(self) -> str:
        """The model, and where its values are from."""
        name = PUBLISHED[self.model].title if self.model in PUBLISHED else self.model
        return f"{name}, {'predicted' if self.is_predicted else 'measured'}"

    @property
    def names(self) -> list[str]:
        """The paper's strategies in its order, then others."""
        first = [name for name in STRATEGIES if name in self.values]
        return [*first, *(name for name in self.values if name not in STRATEGIES)]


Value = Callable[[Measured | Published, str], float]


def draw(
    folder: Path,
    predicted: Sequence[Prediction],
    measured: Mapping[str, Mapping[str, Measured]],
    *,
    speedups: Mapping[str, Mapping[str, Mapping[int, float]]] | None = None,
    accuracy: Mapping[str, Mapping[str, Sequence[Result]]] | None = None,
) -> dict[str, str]:
    """Draw figures 1 to 6 into the folder; return their captions by file name.

    Args:
        predicted: one prediction per model.
        measured: by model and strategy; may be empty if there are predictions.
        speedups: measured speed-ups by model, strategy and number of ranks.
        accuracy: runs by model and strategy, for figure 4.

    Raises:
        DataError: if one cannot be written.
    """
    theirs = [Panel(one.model, _values(one), True) for one in predicted]
    ours = [Panel(model, values, False) for model, values in measured.items() if values]
    captions = _draw_table(folder, [*in_rows(theirs), *in_rows(ours)])
    if predicted or speedups:
        captions["figure2.png"] = _draw_speedups(predicted, speedups or {}, folder / "figure2.png")
    for model, arms in (accuracy or {}).items():
        name = f"figure4-{model}.png"
        draw_by_epoch(arms, "accuracy", "test accuracy", folder / name)
        captions[name] = f"Accuracy of {model} by epoch, measured: medians and ranges of repeats."
    for one in predicted:
        if one.model == TRANSFORMER:
            draw_strategies(one.plan("adaptive"), folder / "figure6.png")
            captions["figure6.png"] = (
                "The strategy that the planner chooses per component of the ViT, predicted. In "
                "the paper attention has MP, MLPs have DP and the embedding has HP."
            )
    return dict(sorted(captions.items()))


def in_rows(panels: Sequence[Panel]) -> list[Sequence[Panel]]:
    """Return the panels in rows of PER_ROW."""
    return [panels[start : start + PER_ROW] for start in range(0, len(panels), PER_ROW)]


def _draw_table(folder: Path, rows: Sequence[Sequence[Panel]]) -> dict[str, str]:
    """Draw what table I has, figures 1, 3 and 5; return their captions by file name."""
    _draw_bars(rows, _hours, "hours", folder / "figure1.png")
    _draw_shares(rows, folder / "figure3.png")
    _draw_bars(rows, _memory, "peak memory (GB)", folder / "figure5.png")
    captions = {
        "figure1.png": "Hours of 100 epochs by strategy, extrapolated.",
        "figure3.png": "Share of communication and (pale) of computing in the time of a step.",
        "figure5.png": "Peak memory of the fullest rank by strategy.",
    }
    hollow = "Hollow marks: table I of the paper. Hatched: predicted."
    return {name: f"{caption} {hollow}" for name, caption in captions.items()}


def _values(prediction: Prediction) -> dict[str, Measured]:
    """Return the predictions of each strategy, in the form of measurements."""
    return {
        name: Measured(
            prediction.hours(name), prediction.communication(name), prediction.memory_gb(name)
        )
        for name in prediction.strategies
    }


def _hours(values: Measured | Published, strategy: str) -> float:
    return values.hours[strategy] if isinstance(values, Published) else values.hours


def _memory(values: Measured | Published, strategy: str) -> float:
    return values.memory_gb[strategy] if isinstance(values, Published) else values.memory_gb


def _percent(values: Measured | Published, strategy: str) -> float:
    if isinstance(values, Published):
        return 100 * values.communication[strategy]
    return 100 * values.communication


def _draw_bars(rows: Sequence[Sequence[Panel]], value: Value, label: str, to: Path) -> None:
    """Draw one bar per strategy."""

    def bars(axes: Any, panel: Panel) -> None:
        for place, name in enumerate(panel.names):
            axes.bar(place, value(panel.values[name], name), 0.7, **_look(name, panel))

    _draw_panels(rows, bars, value, label, to)


def _draw_shares(rows: Sequence[Sequence[Panel]], to: Path) -> None:
    """Draw computing above communication, in per cent of the time."""

    def bars(axes: Any, panel: Panel) -> None:
        for place, name in enumerate(panel.names):
            share = _percent(panel.values[name], name)
            look = _look(name, panel)
            axes.bar(place, share, 0.7, **look)
            axes.bar(place, 100 - share, 0.7, bottom=share, **look | {"alpha": 0.3})
        axes.set_ylim(0, 100)

    _draw_panels(rows, bars, _percent, "communication, computing (%)", to)


def _look(strategy: str, panel: Panel) -> dict[str, Any]:
    return {
        "color": _colour(strategy),
        "hatch": HATCH if panel.is_predicted else None,
        "edgecolor": "white",
        "linewidth": 0,
    }


def _colour(strategy: str) -> str:
    known = strategy in STRATEGIES
    return COLOURS[STRATEGIES.index(strategy)] if known else COLOURS[len(STRATEGIES)]


def _draw_panels(
    rows: Sequence[Sequence[Panel]],
    bars: Callable[[Any, Panel], None],
    value: Value,
    label: str,
    to: Path,
) -> None:
    """Draw rows of predicted and rows of measured models, each with the paper's values."""
    columns = max(map(len, rows))
    with pyplot.rc_context(STYLE_HERE):
        size = (WIDTH * columns, HEIGHT * len(rows))
        figure, grid = pyplot.subplots(
            len(rows), columns, figsize=size, squeeze=False, layout="constrained"
        )
        for row, line in zip(rows, grid, strict=True):
            for axes in line[len(row) :]:
                axes.set_visible(False)
            for panel, axes in zip(row, line, strict=False):
                bars(axes, panel)
                _paper(axes, panel, value)
                axes.set_xticks(range(len(panel.names)), panel.names)
                axes.set_xlim(-0.6, max(len(STRATEGIES), len(panel.names)) - 0.4)
                axes.grid(axis="x", visible=False)
                axes.set_title(panel.title)
            line[0].set_ylabel(label)
        figure.legend(handles=_legend(rows), loc="outside lower center", ncols=3)
        save(figure, to)


def _paper(axes: Any, panel: Panel, value: Value) -> None:
    """Draw the paper's values as hollow marks, if table I has the model."""
    if panel.model not in PUBLISHED:
        return
    published = PUBLISHED[panel.model]
    places = [place for place, name in enumerate(panel.names) if name in STRATEGIES]
    marks = [value(published, panel.names[place]) for place in places]
    axes.plot(places, marks, clip_on=False, zorder=3, **HOLLOW)


def _legend(rows: Sequence[Sequence[Panel]]) -> list[Any]:
    handles: list[Any] = [Line2D([], [], label="table I of the paper", **HOLLOW)]
    for is_predicted in sorted({row[0].is_predicted for row in rows}, reverse=True):
        label = "predicted" if is_predicted else "measured"
        hatch = 2 * HATCH if is_predicted else None
        handles.append(Patch(facecolor="grey", edgecolor="white", hatch=hatch, label=label))
    return handles


def _draw_speedups(
    predicted: Sequence[Prediction],
    measured: Mapping[str, Mapping[str, Mapping[int, float]]],
    to: Path,
) -> str:
    """Draw speed-up against ranks, a panel per model; return the caption."""
    titles = {one.model: one.published.title for one in predicted}
    titles |= {model: model for model in measured if model not in titles}
    by_model = {one.model: one for one in predicted}
    columns = min(PER_ROW, len(titles))
    lines = -(-len(titles) // columns)
    with pyplot.rc_context(STYLE_HERE):
        size = (WIDTH * columns, 1.1 * HEIGHT * lines)
        figure, grid = pyplot.subplots(lines, columns, figsize=size, squeeze=False)
        for axes in grid.flat[len(titles) :]:
            axes.set_visible(False)
        for axes, (model, title) in zip(grid.flat, titles.items(), strict=False):
            ranks = {1, GPUS}
            if model in by_model:
                ranks |= set(_predicted_speedups(axes, by_model[model]))
            for name, values in measured.get(model, {}).items():
                style: Any = {"color": _colour(name), "marker": MARKERS[0], "linestyle": "-"}
                axes.plot(list(values), list(values.values()), label=f"{name}, measured", **style)
                ranks |= set(values)
            axes.plot([1, max(ranks)], [1, max(ranks)], ":", color="grey", label="linear")
            axes.set_xticks(sorted(ranks))
            axes.set(title=title, xlabel="ranks", ylabel="speed-up over one rank")
            axes.legend()
        figure.tight_layout()
        save(figure, to)
    return (
        "Speed-up over one rank by number of ranks; dashed: predicted, solid: measured. Hollow "
        f"marks at {GPUS} ranks: by table I of the paper."
    )


def _predicted_speedups(axes: Any, prediction: Prediction) -> list[int]:
    """Draw predicted curves and the paper's marks of one model; return the numbers of ranks."""
    for place, name in enumerate(IN_SWEEP):
        values, colour = prediction.speedups(name), _colour(name)
        # Wide curves show below those that hide them.
        style: Any = {"color": colour, "label": name, "linewidth": 3 - 0.6 * place}
        axes.plot(list(values), list(values.values()), "--", **style)
        paper = prediction.published.speedup(name)
        axes.plot([GPUS], [paper], zorder=3, **HOLLOW | {"markeredgecolor": colour})
    return list(prediction.swept.points)
