"""The report of `reproduce paper-b`: what was measured here, what is predicted, and verdicts."""

from collections.abc import Callable, Sequence
from pathlib import Path

from hvdtrain.errors import DataError
from hvdtrain.host import files
from hvdtrain.planner.strategies import EPOCHS, IMAGES
from hvdtrain.study.paper_b import emulated, figures, measured, predicted
from hvdtrain.study.paper_b.claims import CONTRADICTIONS, UNSTATED
from hvdtrain.study.paper_b.emulations import Emulations
from hvdtrain.study.paper_b.measured import Measured
from hvdtrain.study.paper_b.options import MOST_OF_TIMED, PaperBOptions
from hvdtrain.study.paper_b.predicted import Prediction
from hvdtrain.study.report import origin
from hvdtrain.study.statistics import median

TITLE = (
    'Baligodugula and Amsaad, "Optimizing Distributed Training Approaches for Scaling Neural '
    'Networks", arXiv 2503.23186.'
)
SHAPES = (
    "The paper does not state the shapes of its strategies. Here a device is one GPU, or one core "
    "to which a rank is bound if there are enough (`--bind`). A strategy is a plan of `plans/` or "
    "a short form of `--plan`: DP has all components on all ranks, MP is a pipeline of one stage "
    "per rank, hybrid has two stages of half of the ranks each, or on fewer than four ranks the "
    "tail with half of the parameters on one rank and the rest on all; figure 6 has the labels of "
    "that figure, except that HP is all ranks if they are fewer than four; objective is the "
    "optimum of the paper's objective with divided work, if no other row is the same; adaptive is "
    "`--plan adaptive`. Hours are those of steps: start-up is left out, and so are adaptive's "
    "profiling and migrations."
)

OBJECTIVE = (
    "The paper minimises the sum over the components of computation and communication, each "
    "component being DP, MP or HP. As printed the computation does not depend on the strategy, so "
    "only communication decides. The other reading divides it among the ranks of DP and HP. Both "
    "are minimised exactly, on times measured once with all ranks at work; neither knows that "
    "stages work at the same time."
)


def write(
    folder: Path,
    options: PaperBOptions,
    results: Sequence[Measured],
    predictions: Sequence[Prediction],
    emulations: Emulations,
) -> Path:
    """Write the report with its figures into the folder; return the path of `report.md`.

    Raises:
        DataError: if something cannot be written.
    """
    captions = figures.draw(
        folder,
        predictions,
        {one.title: _bars(one) for one in results},
        speedups=_speedups(results),
        accuracy={one.model: one.accuracy for one in results if one.accuracy},
    )
    parts = [
        "# Paper B on this machine",
        TITLE,
        *(_measured(options, results) if results else ["Nothing was measured: no models."]),
        predicted.section(predictions),
        emulated.section(emulations),
        "## Where the paper disagrees with itself",
        "\n".join(f"- {line}" for line in CONTRADICTIONS),
        UNSTATED,
        "## Figures",
        *(f"![{name}]({name})\n\n*{caption}*" for name, caption in captions.items()),
    ]
    files.write_text(folder / "report.md", "\n\n".join(parts) + "\n", "the report", DataError)
    return folder / "report.md"


def _measured(options: PaperBOptions, results: Sequence[Measured]) -> list[str]:
    return [
        origin([run for one in results for runs in one.timed.values() for run in runs]),
        "## Measured: time, communication, memory",
        f"{SHAPES} Each value is the median of {options.repeats} run(s) of {options.steps} steps, "
        f"for models that are trained for time only of {MOST_OF_TIMED} run(s) at most and about "
        "half as many steps, in random order for each model, with the 95 % interval (Student's t "
        "on the logarithms). A step has "
        f"{_images(options, results)}. Hours are extrapolated from the median step to {EPOCHS} "
        f"epochs of {IMAGES:,} images. Communication is the share of the steps in which ranks "
        "wait for it.",
        *_by_model(results, measured.time_table),
        "## The paper's objective",
        OBJECTIVE,
        *_by_model(results, lambda one: "\n".join(measured.objective_lines(one))),
        *_accuracy(options, results),
        "## Verdicts",
        *_by_model(results, lambda one: "\n".join(measured.verdicts(one))),
    ]


def _images(options: PaperBOptions, results: Sequence[Measured]) -> str:
    """Return the images per step in words; large models have fewer."""
    fewer = {
        one.model: one.images_per_step
        for one in results
        if one.images_per_step < options.batch_size
    }
    text = f"{options.batch_size} images"
    if not fewer:
        return text
    large = ", ".join(f"{number} for {model}" for model, number in fewer.items())
    return f"{text}, but {large}, whose steps would take too long"


def _accuracy(options: PaperBOptions, results: Sequence[Measured]) -> list[str]:
    if not options.epochs:
        return ["## Measured: accuracy", "Left out by `--epochs 0`."]
    trained = [one for one in results if one.accuracy]
    if not trained:
        return ["## Measured: accuracy", "Left out: no model has both `--models` and real images."]
    size = f" of {options.accuracy_pixels} pixels" if options.accuracy_pixels else ""
    return [
        "## Measured: accuracy",
        f"Test accuracy after {options.epochs} epoch(s), {options.batch_size} images{size} per "
        f"step, medians of {options.seeds} run(s), which are not timed and use all cores. All "
        "strategies see the same samples in the same order. Equivalence is shown if two one-sided "
        "t-tests refute a difference of 0.5 points or more (p < 0.05).",
        *_by_model(trained, measured.accuracy_table),
    ]


def _by_model(results: Sequence[Measured], text_of: Callable[[Measured], str]) -> list[str]:
    return [text for one in results for text in (f"### {one.title}", text_of(one))]


def _bars(one: Measured) -> dict[str, figures.Measured]:
    return {
        strategy: figures.Measured(
            hours=median(one.hours(strategy)).value,
            communication=one.communication(strategy).value,
            memory_gb=median(one.memory_bytes(strategy)).value / 1e9,
        )
        for strategy in one.timed
    }


def _speedups(results: Sequence[Measured]) -> dict[str, dict[str, dict[int, float]]]:
    """Return measured speed-ups by title of the picture, strategy and number of ranks.

    The title differs from that of a model of table I, with whose predictions they do not compare.
    """
    speedups: dict[str, dict[str, dict[int, float]]] = {}
    for one in results:
        by_strategy = speedups.setdefault(f"{one.model}, measured", {})
        for strategy in one.timed:
            if strategy != measured.SINGLE:
                values = by_strategy.setdefault(strategy, {1: 1.0})
                values[one.ranks] = one.speedup(strategy, measured.SINGLE).value
    return speedups
