"""The strategies that are compared, as configurations of training runs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain import models
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import INDEX_FILE, Index
from hvdtrain.data.synthetic import synth
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files
from hvdtrain.models.costs import ComponentCost, component_costs
from hvdtrain.plan.plan import Plan
from hvdtrain.planner import profile as profiles
from hvdtrain.planner.cost import Known
from hvdtrain.study.paper_b.objective import Optimum
from hvdtrain.study.paper_b.options import ModelAtSize, PaperBOptions
from hvdtrain.study.paper_b.plans import figure_6, hybrid
from hvdtrain.study.runs import Arm, make_folder

SINGLE, DP, MP, HYBRID, ADAPTIVE = "single", "DP", "MP", "hybrid", "adaptive"
SYNTHETIC = 1024  # images of a size that the packed ones do not have
FIGURE_6, OBJECTIVE = "figure 6", "objective"


@dataclass(frozen=True)
class Compared:
    """A strategy for a model: its timed runs, and its runs for accuracy on real images."""

    model: ModelAtSize
    strategy: str
    timed: Arm
    accuracy: Arm | None


def profiled(options: PaperBOptions, index: Index) -> list[Arm]:
    """Return the runs that measure each model once, with all ranks at work."""
    return [_profiled(options, model, index) for model in options.trained]


def profile_of(options: PaperBOptions, model: ModelAtSize) -> Path:
    """Return the file with the measured times of a model."""
    return Path(options.to) / "profiles" / f"{model.key}-{options.ranks}.json"


def known_of(options: PaperBOptions, model: ModelAtSize, index: Index) -> Known:
    """Return what was measured of a model.

    Raises:
        UsageError: if there is no profile, or it is of other settings.
    """
    costs, path = costs_of(model, index), profile_of(options, model)
    config = _config(options, model, index, "auto")
    subjects = profiles.subjects_of(config, costs, pixels_of(model, index))
    read = profiles.load(path, subjects, [cost.name for cost in costs], options.ranks)
    if isinstance(read, str):
        raise UsageError(f"{path} is a profile of other settings ({read}): choose another --to")
    return Known(costs, *read)


def compared(
    options: PaperBOptions, index: Index, optima: Mapping[str, Optimum]
) -> list[Compared]:
    """Return the strategies for each model, and write the plans that have no short form.

    Args:
        optima: of the paper's objective with divided work, by model.

    Raises:
        DataError: if a plan cannot be written.
    """
    return [
        _compared(options, model, index, strategy, plan)
        for model in options.trained
        for strategy, plan in _plans(options, model, index, optima[model.key]).items()
    ]


def _plans(
    options: PaperBOptions, model: ModelAtSize, index: Index, optimum: Optimum
) -> dict[str, str]:
    """Return the values of --plan by strategy."""
    costs = costs_of(model, index)
    plans = {SINGLE: "single", DP: "dp"}

    def write(strategy: str, plan: Plan) -> str:
        return written(options, f"{model.key}-{strategy.replace(' ', '-')}-{options.ranks}", plan)

    if len(costs) > 1:
        plans[MP] = "mp"
        plans[HYBRID] = write(HYBRID, hybrid(costs, options.ranks))
    figure = figure_6([cost.name for cost in costs], options.ranks)
    if figure is not None:
        plans[FIGURE_6] = write(FIGURE_6, figure)
    if same_as(optimum, options.ranks) == OBJECTIVE:
        plans[OBJECTIVE] = write(OBJECTIVE, optimum.plan)
    return plans | {ADAPTIVE: "adaptive"}


def same_as(optimum: Optimum, ranks: int) -> str | None:
    """Return the strategy that an optimum is the same as; OBJECTIVE for a plan of its own.

    None if it leaves ranks idle, which a plan may not.
    """
    groups = set(optimum.groups.values())
    if groups == {tuple(range(ranks))}:
        return DP
    if len(groups) == 1 and len(*groups) == 1:
        return SINGLE
    used = {rank for group in groups for rank in group}
    return OBJECTIVE if len(used) == ranks else None


def costs_of(model: ModelAtSize, index: Index) -> list[ComponentCost]:
    """Return the components of a model, with their counted operations and bytes."""
    size = pixels_of(model, index)
    parts = models.components(model.name, index.classes, size)
    return list(component_costs(parts, size, classes=index.classes))


def pixels_of(model: ModelAtSize, index: Index) -> int:
    """Return the height and width of a model's images."""
    return model.pixels or index.image_shape[0]


def make_images(options: PaperBOptions, index: Index) -> None:
    """Make synthetic images for the models whose images are larger than the packed ones.

    Time and memory do not depend on what images show.

    Raises:
        DataError: if they cannot be written.
    """
    for model in options.trained:
        folder = Path(_data_of(options, model, index))
        if not (folder / INDEX_FILE).exists():
            synth(folder, SYNTHETIC, index.classes, size=pixels_of(model, index))


def _data_of(options: PaperBOptions, model: ModelAtSize, index: Index) -> str:
    """Return the data set of a model's runs: synthetic if the packed images are too small."""
    try:
        index.at_size(model.pixels)
    except UsageError:
        return str(Path(options.to) / f"images-{model.pixels}")
    return options.data


def written(options: PaperBOptions, name: str, plan: Plan) -> str:
    """Write a plan into the folder of the study and return its path.

    Raises:
        DataError: if it cannot be written.
    """
    path = Path(options.to) / "plans" / f"{name}.json"
    make_folder(path.parent)
    files.write_text(path, json.dumps(plan.to_json(), indent=1) + "\n", "the plan", DataError)
    return str(path)


def _config(options: PaperBOptions, model: ModelAtSize, index: Index, plan: str) -> TrainConfig:
    # A device of the paper is one core here, in all strategies.
    return TrainConfig(
        model=model.name,
        data=_data_of(options, model, index),
        plan=plan,
        batch_size=options.batch_size,
        image_size=model.pixels,
        threads=1,
    )


def _profiled(options: PaperBOptions, model: ModelAtSize, index: Index) -> Arm:
    config = replace(
        _config(options, model, index, "auto"),
        profile=str(profile_of(options, model)),
        max_steps=options.steps,
        eval_every=0,
        log_every=1,
    )
    key = f"profile-{model.key}-{options.ranks}"
    return Arm(key, f"{model.key}, profile", options.ranks, config)


def _compared(
    options: PaperBOptions, model: ModelAtSize, index: Index, strategy: str, plan: str
) -> Compared:
    config = _config(options, model, index, plan)
    key = f"{model.key}-{strategy.replace(' ', '-')}"
    name = f"{model.key}, {strategy}"
    ranks = 1 if strategy == SINGLE else options.ranks
    timed = replace(config, max_steps=options.steps, eval_every=0, log_every=1)
    accuracy = None
    if options.epochs and config.data == options.data:
        trained = replace(config, epochs=options.epochs)
        accuracy = Arm(f"accuracy-{key}-{ranks}", f"{name}, accuracy", ranks, trained)
    timed_arm = Arm(f"timed-{key}-{ranks}", f"{name}, timed", ranks, timed)
    return Compared(model, strategy, timed_arm, accuracy)
