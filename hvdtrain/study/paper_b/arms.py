"""The strategies that are compared, as configurations of training runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hvdtrain import models
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import INDEX_FILE, Index
from hvdtrain.data.synthetic import synth
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files
from hvdtrain.models.costs import ComponentCost, component_costs
from hvdtrain.plan.plan import Plan
from hvdtrain.planner import profilefile
from hvdtrain.planner.cost import Known
from hvdtrain.study.paper_b.claims import STRATEGIES
from hvdtrain.study.paper_b.objective import Optimum
from hvdtrain.study.paper_b.options import ModelAtSize, PaperBOptions, devices, on_gpus
from hvdtrain.study.paper_b.plans import figure_6, hybrid
from hvdtrain.study.runs import Arm, make_folder

SINGLE, DP, MP, HYBRID, ADAPTIVE = STRATEGIES
FIGURE_6, OBJECTIVE = "figure 6", "objective"
SYNTHETIC = 1024  # images of a size that the packed ones do not have
# Operations of a forward of all images of a step, at most, unless it has fewer than LEAST_IMAGES.
MOST_WORK, LEAST_IMAGES = 8e10, 8


class Case(NamedTuple):
    """A model on a number of ranks: strategies are compared within it."""

    model: ModelAtSize
    ranks: int

    @property
    def key(self) -> str:
        """Return the name in files."""
        return f"{self.model.key}-{self.ranks}"

    @property
    def title(self) -> str:
        """Return the name in the report."""
        return f"{self.model.key}, {self.ranks} ranks"


@dataclass(frozen=True)
class Compared:
    """A strategy in a case: its timed runs, and its runs for accuracy on real images."""

    case: Case
    strategy: str
    timed: Arm
    accuracy: Arm | None


def cases(options: PaperBOptions) -> list[Case]:
    """Return all models on all numbers of ranks."""
    return [Case(model, n) for model in options.trained for n in options.numbers_of_ranks]


def profile_of(options: PaperBOptions, case: Case) -> Path:
    """Return the file with the measured times of a model."""
    return Path(options.to) / "profiles" / f"{case.key}.json"


def known_of(options: PaperBOptions, case: Case, index: Index) -> Known:
    """Return what was measured of a model.

    Raises:
        UsageError: if there is no profile, or it is of other settings.
    """
    costs, path = costs_of(case.model, index), profile_of(options, case)
    config = _timed(options, case.model, index, "auto", case.ranks)
    subjects = profilefile.subjects_of(config, costs, pixels_of(case.model, index))
    read = profilefile.load(path, subjects, [cost.name for cost in costs], case.ranks)
    if isinstance(read, str):
        raise UsageError(f"{path} is a profile of other settings ({read}): choose another --to")
    return Known(costs, *read)


def compared(
    options: PaperBOptions, index: Index, optima: Mapping[Case, Optimum]
) -> list[Compared]:
    """Return the strategies in each case, and write the plans that have no short form.

    Args:
        optima: of the paper's objective with divided work.

    Raises:
        DataError: if a plan cannot be written.
    """
    return [
        _compared(options, case, index, strategy, plan)
        for case, optimum in optima.items()
        for strategy, plan in _plans(options, case, index, optimum).items()
    ]


def _plans(options: PaperBOptions, case: Case, index: Index, optimum: Optimum) -> dict[str, str]:
    """Return the values of --plan by strategy."""
    costs = costs_of(case.model, index)
    plans = {SINGLE: "single", DP: "dp"}

    def write(strategy: str, plan: Plan) -> str:
        name = f"{case.model.key}-{strategy.replace(' ', '-')}-{case.ranks}"
        return written(options, name, plan)

    if len(costs) > 1:
        plans[MP] = "mp"
        plans[HYBRID] = write(HYBRID, hybrid(costs, case.ranks))
    if case.model in options.with_accuracy:
        figure = figure_6([cost.name for cost in costs], case.ranks)
        if figure is not None:
            plans[FIGURE_6] = write(FIGURE_6, figure)
        if same_as(optimum, case.ranks) == OBJECTIVE:
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


def check_accuracy_pixels(options: PaperBOptions, index: Index) -> None:
    """Check the size of the images of the runs for accuracy, which come after all others.

    Raises:
        UsageError: if the images are smaller, or a model does not accept this size.
    """
    pixels = options.accuracy_pixels
    if pixels is None or not options.epochs:
        return
    if pixels > index.image_shape[0]:
        raise UsageError(
            f"--accuracy-pixels {pixels} is more than the {index.image_shape[0]} pixels of the "
            "images: give a smaller number"
        )
    for model in options.with_accuracy:
        models.components(model.name, index.classes, pixels)


def images_per_step(options: PaperBOptions, model: ModelAtSize, index: Index) -> int:
    """Return the images per step of timed runs: --batch-size, halved until the work fits."""
    work = sum(cost.forward_flops for cost in costs_of(model, index))
    images, least = options.batch_size, max(LEAST_IMAGES, options.numbers_of_ranks[-1])
    while not on_gpus() and images * work > MOST_WORK and images >= 2 * least:
        images //= 2
    return images


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
    return TrainConfig(
        model=model.name,
        data=_data_of(options, model, index),
        plan=plan,
        batch_size=options.batch_size,
        image_size=model.pixels,
    )


def _timed(
    options: PaperBOptions, model: ModelAtSize, index: Index, plan: str, ranks: int
) -> TrainConfig:
    """Return the configuration of a timed run.

    Without GPUs a device of the paper is one core, to which a rank is bound if there are enough.
    """
    has_gpus = on_gpus()
    return replace(
        _config(options, model, index, plan),
        batch_size=images_per_step(options, model, index),
        threads=None if has_gpus else 1,
        bind=not has_gpus and ranks <= devices(),
        max_steps=options.steps_of(model),
        eval_every=0,
        log_every=1,
    )


def profiled(options: PaperBOptions, index: Index) -> list[Arm]:
    """Return the runs that measure each model once, with all ranks at work."""
    return [_profiled(options, case, index) for case in cases(options)]


def _profiled(options: PaperBOptions, case: Case, index: Index) -> Arm:
    config = replace(
        _timed(options, case.model, index, "auto", case.ranks),
        profile=str(profile_of(options, case)),
    )
    return Arm(f"profile-{case.key}", f"{case.title}, profile", case.ranks, config)


def _compared(
    options: PaperBOptions, case: Case, index: Index, strategy: str, plan: str
) -> Compared:
    model, ranks = case.model, 1 if strategy == SINGLE else case.ranks
    key = f"{model.key}-{strategy.replace(' ', '-')}-{ranks}"
    config = _timed(options, model, index, plan, ranks)
    timed = Arm(f"timed-{key}", f"{model.key}, {strategy}, timed", ranks, config)
    accuracy = None
    if strategy in STRATEGIES and _has_accuracy(options, case, index):
        trained = replace(
            _config(options, model, index, plan),
            epochs=options.epochs,
            image_size=options.accuracy_pixels or model.pixels,
        )
        accuracy = Arm(f"accuracy-{key}", f"{model.key}, {strategy}, accuracy", ranks, trained)
    return Compared(case, strategy, timed, accuracy)


def _has_accuracy(options: PaperBOptions, case: Case, index: Index) -> bool:
    """Return whether a case is trained for accuracy: on real images, and the most ranks."""
    is_asked = options.epochs > 0 and case.model in options.with_accuracy
    is_real = _data_of(options, case.model, index) == options.data
    return is_asked and is_real and case.ranks == options.numbers_of_ranks[-1]


def distinct(arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms without repeats: all numbers of ranks share the runs of one rank."""
    return list({arm.key: arm for arm in arms}.values())
