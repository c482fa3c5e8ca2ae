"""The strategies that are compared, as configurations of training runs."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain import models
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Index
from hvdtrain.errors import DataError
from hvdtrain.host import files
from hvdtrain.models.costs import ComponentCost, component_costs
from hvdtrain.plan.plan import Plan
from hvdtrain.study.paper_b.options import ModelAtSize, PaperBOptions
from hvdtrain.study.paper_b.plans import figure_6, hybrid
from hvdtrain.study.runs import Arm, make_folder

SINGLE, DP, MP, HYBRID, FIGURE_6, ADAPTIVE = "single", "DP", "MP", "hybrid", "figure 6", "adaptive"


@dataclass(frozen=True)
class Compared:
    """A strategy for a model: its timed runs, and its runs for accuracy."""

    model: ModelAtSize
    strategy: str
    timed: Arm
    accuracy: Arm


def compared(options: PaperBOptions, index: Index) -> list[Compared]:
    """Return the strategies for each model, and write the plans that have no short form.

    Raises:
        DataError: if a plan cannot be written.
    """
    return [
        _compared(options, model, strategy, plan)
        for model in options.trained
        for strategy, plan in _plans(options, model, index).items()
    ]


def _plans(options: PaperBOptions, model: ModelAtSize, index: Index) -> dict[str, str]:
    """Return the values of --plan by strategy."""
    costs = costs_of(model, index)
    plans = {SINGLE: "single", DP: "dp"}
    if len(costs) > 1:
        plans[MP] = "mp"
        plans[HYBRID] = _written(options, model, HYBRID, hybrid(costs, options.ranks))
    figure = figure_6([cost.name for cost in costs], options.ranks)
    if figure is not None:
        plans[FIGURE_6] = _written(options, model, FIGURE_6, figure)
    return plans | {ADAPTIVE: "adaptive"}


def costs_of(model: ModelAtSize, index: Index) -> list[ComponentCost]:
    """Return the components of a model, with their counted operations and bytes."""
    size = index.at_size(model.pixels).image_shape[0]
    parts = models.components(model.name, index.classes, size)
    return list(component_costs(parts, size, classes=index.classes))


def _written(options: PaperBOptions, model: ModelAtSize, strategy: str, plan: Plan) -> str:
    """Write a plan into the folder of the study and return its path."""
    name = f"{model.key}-{strategy.replace(' ', '-')}-{options.ranks}.json"
    path = Path(options.to) / "plans" / name
    make_folder(path.parent)
    files.write_text(path, json.dumps(plan.to_json(), indent=1) + "\n", "the plan", DataError)
    return str(path)


def _compared(options: PaperBOptions, model: ModelAtSize, strategy: str, plan: str) -> Compared:
    # A device of the paper is one core here, in all strategies.
    config = TrainConfig(
        model=model.name,
        data=options.data,
        plan=plan,
        batch_size=options.batch_size,
        image_size=model.pixels,
        threads=1,
    )
    key = f"{model.key}-{strategy.replace(' ', '-')}"
    name = f"{model.key}, {strategy}"
    ranks = 1 if strategy == SINGLE else options.ranks
    timed = replace(config, max_steps=options.steps, eval_every=0, log_every=1)
    trained = replace(config, epochs=max(1, options.epochs))
    return Compared(
        model,
        strategy,
        Arm(f"timed-{key}-{ranks}", f"{name}, timed", ranks, timed),
        Arm(f"accuracy-{key}-{ranks}", f"{name}, accuracy", ranks, trained),
    )
