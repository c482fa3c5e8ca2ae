"""The report of `reproduce paper-b`: what was measured here, what is predicted, and verdicts."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from hvdtrain.data.index import INDEX_FILE, read_index
from hvdtrain.data.sources import synth
from hvdtrain.errors import DataError
from hvdtrain.host import files
from hvdtrain.plan.plan import plan_of_run
from hvdtrain.planner.strategies import EPOCHS, IMAGES
from hvdtrain.study.laws import markdown_table, median, number
from hvdtrain.study.options import MOST_OF_TIMED, PaperBOptions
from hvdtrain.study.paper_b.claims import claims_table
from hvdtrain.study.paper_b.plans import (
    ADAPTIVE,
    COMMUNICATION,
    CONTRADICTIONS,
    DIVIDED,
    GPUS,
    HOURS,
    MEMORY,
    POINTS,
    PUBLISHED,
    SINGLE,
    SPEEDUP,
    STRATEGIES,
    SYNTHETIC,
    TABLE_I,
    UNSTATED,
    Case,
    Measured,
)
from hvdtrain.study.paper_b.v100 import (
    Emulations,
    Prediction,
    emulate,
    emulated_section,
    predict,
    predicted_section,
)
from hvdtrain.study.plots import (
    COLOURS,
    HEIGHT,
    STYLE,
    WIDTH,
    draw_by_epoch,
    draw_strategies,
    save,
)
from hvdtrain.study.report import origin
from hvdtrain.study.results import Result, read
from hvdtrain.study.runs import Arm, make_folder, run_all

TITLE = (
    'Baligodugula and Amsaad, "Optimizing Distributed Training Approaches for Scaling Neural '
    'Networks", arXiv 2503.23186.'
)
SHAPES = (
    "The paper does not state the shapes of its strategies. Here a device is one GPU, or one core "
    "to which a rank is bound if there are enough (`--bind`). A strategy is a plan of `plans/` or "
    "a short form of `--plan`:"
)
OBJECTIVE = (
    "The paper minimises the sum over the components of computation and communication, each "
    "component being DP, MP or HP. As printed the computation does not depend on the strategy, so "
    "only communication decides. The other reading divides it among the ranks of DP and HP. Both "
    "are minimised exactly, on times measured once with all ranks at work; neither knows that "
    "stages work at the same time."
)
CLAIMS = (
    "A row for each claim of the paper and each model. A claim is shown if the whole interval "
    "agrees with it, contradicted if none of it does, and else not shown. A prediction has no "
    "interval, and shows nothing."
)
HOLLOW: Any = {
    "linestyle": "none",
    "marker": "D",
    "markersize": 5,
    "markerfacecolor": "none",
    "markeredgecolor": "black",
    "clip_on": False,
    "zorder": 3,
}
MARKS = "Hollow marks: by table I of the paper."
# What table I has: the file and the caption.
OF_TABLE = {
    HOURS: ("figure1.png", "Hours of 100 epochs by strategy, extrapolated."),
    COMMUNICATION: (
        "figure3.png",
        "Share of communication and (pale) of computing in the time of a step.",
    ),
    MEMORY: ("figure5.png", "Peak memory of the fullest rank by strategy."),
}


def write(
    folder: Path,
    options: PaperBOptions,
    measured: Sequence[Measured],
    predictions: Sequence[Prediction],
    emulations: Emulations,
) -> Path:
    """Write the report with its figures into the folder; return the path of `report.md`.

    Raises:
        DataError: if something cannot be written.
    """
    captions = draw_figures(folder, predictions, measured)
    parts = [
        "# Paper B on this machine",
        TITLE,
        *(_measured(options, measured) if measured else ["Nothing was measured: no models."]),
        "## Claims",
        CLAIMS,
        claims_table(measured, predictions),
        predicted_section(predictions),
        emulated_section(emulations),
        "## Where the paper disagrees with itself",
        "\n".join(f"- {line}" for line in CONTRADICTIONS),
        UNSTATED,
        "## Figures",
        *(f"![{name}]({name})\n\n*{caption}*" for name, caption in captions.items()),
    ]
    files.write_text(folder / "report.md", "\n\n".join(parts) + "\n", "the report", DataError)
    return folder / "report.md"


def _measured(options: PaperBOptions, measured: Sequence[Measured]) -> list[str]:
    images = {one.model: one.timed[SINGLE][0].batch_size for one in measured}
    fewer = [f"{n} for {model}" for model, n in images.items() if n < options.batch_size]
    large = f", but {', '.join(fewer)}, whose steps would take too long" if fewer else ""
    trained = [one for one in measured if one.accuracy]
    if trained:
        accuracy = [
            f"Test accuracy after {options.epochs} epoch(s), {options.batch_size} images "
            f"per step, medians of {options.seeds} run(s), which are not timed and use all cores. "
            "All strategies see the same samples in the same order. Equivalence is shown if two "
            "one-sided t-tests refute a difference of 0.5 points or more (p < 0.05).",
            *_by_model(trained, accuracy_table),
        ]
    elif options.epochs:
        accuracy = ["Left out: no model has both `--models` and real images."]
    else:
        accuracy = ["Left out by `--epochs 0`."]
    return [
        origin([run for one in measured for runs in one.timed.values() for run in runs]),
        "## Measured: time, communication, memory",
        SHAPES,
        markdown_table([{"strategy": name, "plan": shape} for name, shape in STRATEGIES.items()]),
        "Hours are those of steps: start-up is left out, and so are adaptive's profiling and "
        f"migrations. Each value is the median of {options.repeats} run(s) of {options.steps} "
        f"steps, for models that are trained for time only of {MOST_OF_TIMED} run(s) at most and "
        "about half as many steps, in random order for each model, with the 95 % interval "
        f"(Student's t on the logarithms). A step has {options.batch_size} images{large}. Hours "
        f"are extrapolated from the median step to {EPOCHS} epochs of {IMAGES:,} images. "
        "Communication is the share of the steps in which ranks wait for it.",
        *_by_model(measured, time_table),
        "## The paper's objective",
        OBJECTIVE,
        *_by_model(measured, objective_lines),
        "## Measured: accuracy",
        *accuracy,
    ]


def _by_model(results: Sequence[Measured], text_of: Callable[[Measured], str]) -> list[str]:
    return [text for one in results for text in (f"### {one.title}", text_of(one))]


def time_table(measured: Measured) -> str:
    """Return table I as measured, with intervals."""
    rows = []
    for strategy, runs in measured.timed.items():
        bubble = median([run.bubble / run.train_seconds for run in runs]).value
        memory = 1e9 * measured.values[MEMORY][strategy]
        rates = median([run.batch_size / run.step_seconds for run in runs])
        hours = median(measured.hours(strategy))
        rows.append(
            {
                "strategy": strategy,
                "ranks": str(runs[0].ranks),
                "images/s": number(rates, ",.1f"),
                f"hours for {EPOCHS} epochs (extrapolated)": number(hours, ".1f"),
                "speed-up over single": number(measured.speedup(strategy, SINGLE), ".2f"),
                "communication": f"{measured.values[COMMUNICATION][strategy]:.1%}",
                "bubble": f"{bubble:.1%}",
                "peak memory, MiB": f"{memory / 2**20:,.0f}",
            }
        )
    return markdown_table(rows)


def accuracy_table(measured: Measured) -> str:
    """Return the accuracy by strategy, and whether it is equivalent to that of one rank."""
    rows = []
    for strategy in measured.accuracy:
        values = measured.accuracies(strategy)
        points = equivalent = "-"
        if strategy != SINGLE:
            points = number(measured.points_apart(strategy), "+.2f")
            equivalent = "shown" if measured.is_equivalent(strategy) else "not shown"
        rows.append(
            {
                "strategy": strategy,
                "test accuracy": number(median(values), ".4f"),
                "points from single": points,
                f"within {POINTS:g} points": equivalent,
            }
        )
    return markdown_table(rows)


def objective_lines(measured: Measured) -> str:
    """Return a line per reading of the paper's objective: its optimum, and what it is here."""
    lines = []
    for reading, optimum in measured.optima.items():
        where = []
        for group, items in groupby(optimum.groups.items(), key=lambda item: item[1]):
            names = [name for name, _ in items]
            ends = " to ".join(dict.fromkeys((names[0], names[-1])))
            where.append(f"{ends} on rank {', '.join(map(str, group))}")
        same = optimum.same_as(measured.ranks)
        if same is None:
            result = "It leaves ranks idle, which a plan may not: not measured."
        elif same in measured.timed:
            seconds = median([run.step_seconds for run in measured.timed[same]]).value
            result = f"Measured (row {same}): {1e3 * seconds:.0f} ms."
        else:
            result = "A plan of its own, which was not measured."
        lines.append(
            f"- {reading}: {'; '.join(where)}. The objective promises "
            f"{1e3 * optimum.seconds:.0f} ms per step. {result}"
        )
    return "\n".join(lines)


def draw_figures(
    folder: Path, predicted: Sequence[Prediction], measured: Sequence[Measured]
) -> dict[str, str]:
    """Draw figures 1 to 6 into the folder; return their captions by file name.

    Args:
        measured: may be empty.

    Raises:
        DataError: if one cannot be written.
    """
    captions = {}
    theirs = {f"{PUBLISHED[one.model].title}, predicted": one for one in predicted}
    ours = {f"{one.title}, measured": one for one in measured}
    for quantity, (file, caption) in OF_TABLE.items():
        _draw(theirs | ours, partial(_bars, quantity), quantity, folder / file)
        captions[file] = f"{caption} {MARKS}"
    speedups: dict[str, dict[str, dict[int, float]]] = {}
    for one in measured:
        by_strategy = speedups.setdefault(f"{one.model}, measured", {})
        for name in one.timed:
            if name != SINGLE:
                values = by_strategy.setdefault(name, {1: 1.0})
                values[one.ranks] = one.speedup(name, SINGLE).value
    _draw(theirs | speedups, _curves, "speed-up over one rank", folder / "figure2.png")
    captions["figure2.png"] = f"Speed-up over one rank by number of ranks. {MARKS}"
    for one in measured:
        if one.accuracy:
            name = f"figure4-{one.model}.png"
            draw_by_epoch(one.accuracy, "accuracy", "test accuracy", folder / name)
            captions[name] = (
                f"Accuracy of {one.model} by epoch, measured: medians and ranges of repeats."
            )
    vit = next(one for one in predicted if one.model == "vit_b16")
    draw_strategies(vit.plans[ADAPTIVE], folder / "figure6.png")
    for one in measured:
        if one.model.startswith("vit") and ADAPTIVE in one.timed:
            name = f"figure6-{one.model}-{one.ranks}.png"
            draw_strategies(plan_of_run(one.timed[ADAPTIVE][-1].path), folder / name)
            captions[name] = f"The plan with which adaptive ended, {one.title}."
    captions["figure6.png"] = (
        "The strategy that the planner chooses per component of the ViT, predicted. In the paper "
        "attention has MP, MLPs have DP and the embedding has HP."
    )
    return dict(sorted(captions.items()))


def _draw(
    panels: Mapping[str, Any], draw_panel: Callable[[Any, Any], None], label: str, to: Path
) -> None:
    """Draw panels, two in a row.

    Args:
        panels: what `draw_panel` draws, by title.
    """
    rows = -(-len(panels) // 2)
    with pyplot.rc_context(STYLE):
        size = (2 * WIDTH, HEIGHT * rows)
        figure, grid = pyplot.subplots(rows, 2, figsize=size, squeeze=False, layout="constrained")
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (title, panel) in zip(grid.flat, panels.items(), strict=False):
            draw_panel(axes, panel)
            axes.set(title=title, ylabel=label)
        save(figure, to)


def _bars(quantity: str, axes: Any, one: Prediction | Measured) -> None:
    values = one.values[quantity]
    for place, (name, value) in enumerate(values.items()):
        axes.bar(place, value, 0.7, color=_colour(name))
        if quantity == COMMUNICATION:
            axes.bar(place, 1 - value, 0.7, bottom=value, color=_colour(name), alpha=0.3)
        if isinstance(one, Prediction):
            axes.plot([place], [PUBLISHED[one.model].values[quantity][name]], **HOLLOW)
    axes.set_xticks(range(len(values)), list(values), rotation=20)


def _curves(axes: Any, one: Prediction | Mapping[str, Mapping[int, float]]) -> None:
    speedups = one.speedups if isinstance(one, Prediction) else one
    for place, (name, values) in enumerate(speedups.items()):
        # Wide curves show below those that hide them.
        style: Any = {"color": _colour(name), "linewidth": max(1, 3 - 0.6 * place), "label": name}
        axes.plot(*zip(*values.items(), strict=True), "o-", **style)
        if isinstance(one, Prediction):
            paper = PUBLISHED[one.model].values[SPEEDUP][name]
            axes.plot([GPUS], [paper], **HOLLOW | {"markeredgecolor": _colour(name)})
    axes.set_xticks(sorted({ranks for values in speedups.values() for ranks in values}))
    axes.set_xlabel("ranks")
    axes.legend()


def _colour(strategy: str) -> str:
    return COLOURS[TABLE_I.index(strategy) if strategy in TABLE_I else len(TABLE_I)]


def reproduce(options: PaperBOptions, say: Callable[[str], object]) -> Path:
    """Train all runs and write the report; return the path of `report.md`.

    Args:
        say: called with each line of progress.

    Raises:
        UsageError: if the folder holds runs of other settings, or a model does not accept the
            images.
        DataError: if there is no data set, or something cannot be written.
        HvdtrainError: the error of a run that failed; the same command resumes.
    """
    index, folder = read_index(options.data), Path(options.to)
    make_folder(folder / "profiles")
    cases = [
        Case(options, index, model, ranks)
        for model in options.trained
        for ranks in options.numbers_of_ranks
    ]
    for case in cases:
        # Synthetic if the packed images are too small: time and memory do not depend on them.
        if not (Path(case.data) / INDEX_FILE).exists():
            synth(case.data, SYNTHETIC, index.classes, size=case.pixels)
    run_all([case.profiled for case in cases], 1, folder, say)
    sides = []
    for case in cases:
        optima = case.optima()
        timed = case.timed(optima[DIVIDED])
        sides.append((case, optima, timed, case.accuracy(timed)))
    folders: dict[str, list[Path]] = {}
    for model in options.trained:
        # By key: all numbers of ranks share the runs of one rank.
        arms = {
            arm.key: arm
            for case, _, timed, _ in sides
            if case.model == model
            for arm in timed.values()
        }
        folders |= run_all(list(arms.values()), options.repeats_of(model), folder, say)
    trained = [arm for *_, accuracy in sides for arm in accuracy.values()]
    folders |= run_all(trained, options.seeds, folder, say)

    def results(arms: Mapping[str, Arm]) -> dict[str, list[Result]]:
        return {name: [read(path) for path in sorted(folders[arms[name].key])] for name in arms}

    measured = [
        Measured(case.model.key, case.ranks, results(timed), results(accuracy), optima)
        for case, optima, timed, accuracy in sides
    ]
    say("predicting table I")
    predictions = [predict(model) for model in PUBLISHED]
    return write(folder, options, measured, predictions, emulate(options, say))
