"""`reproduce paper-b`: trains what is not trained yet, predicts, and writes the report."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import cuda

from hvdtrain import models
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import INDEX_FILE, Index, read_index
from hvdtrain.data.synthetic import synth
from hvdtrain.errors import UsageError
from hvdtrain.models.costs import ComponentCost, component_costs
from hvdtrain.planner import profilefile
from hvdtrain.planner.cost import Known
from hvdtrain.study.paper_b import plans, report
from hvdtrain.study.paper_b.claims import PUBLISHED, Measured
from hvdtrain.study.paper_b.options import ModelAtSize, PaperBOptions, devices
from hvdtrain.study.paper_b.plans import DIVIDED, READINGS, SINGLE, STRATEGIES, TABLE_I, Optimum
from hvdtrain.study.paper_b.v100 import emulate, predict
from hvdtrain.study.results import Result, read
from hvdtrain.study.runs import Arm, make_folder, run_all

SYNTHETIC = 1024  # images of a size that the packed ones do not have
# Operations of a forward of all images of a step, at most, unless it has fewer than LEAST_IMAGES.
MOST_WORK, LEAST_IMAGES = 8e10, 8


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
        case.make_images()
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
    return report.write(folder, options, measured, predictions, emulate(options, say))


@dataclass(frozen=True)
class Case:
    """A model on a number of ranks: strategies are compared within it."""

    options: PaperBOptions
    index: Index
    model: ModelAtSize
    ranks: int

    @cached_property
    def costs(self) -> list[ComponentCost]:
        """The components of the model, with their counted operations and bytes."""
        classes = self.index.classes
        parts = models.components(self.model.name, classes, self.pixels)
        return list(component_costs(parts, self.pixels, classes=classes))

    @property
    def pixels(self) -> int:
        """The height and width of the images."""
        return self.model.pixels or self.index.image_shape[0]

    @property
    def data(self) -> str:
        """The data set of the runs: synthetic if the packed images are too small."""
        try:
            self.index.at_size(self.model.pixels)
        except UsageError:
            return str(Path(self.options.to) / f"images-{self.model.pixels}")
        return self.options.data

    def make_images(self) -> None:
        """Make synthetic images if the packed ones are too small.

        Time and memory do not depend on what images show.

        Raises:
            DataError: if they cannot be written.
        """
        if not (Path(self.data) / INDEX_FILE).exists():
            synth(self.data, SYNTHETIC, self.index.classes, size=self.pixels)

    @property
    def images_per_step(self) -> int:
        """The images per step of timed runs: --batch-size, halved until the work fits."""
        work = sum(cost.forward_flops for cost in self.costs)
        images, least = self.options.batch_size, max(LEAST_IMAGES, *self.options.numbers_of_ranks)
        while not cuda.is_available() and images * work > MOST_WORK and images >= 2 * least:
            images //= 2
        return images

    @property
    def profiled(self) -> Arm:
        """The run that measures the model once, with all ranks at work."""
        config = replace(self._timed("auto", self.ranks), profile=str(self._profile))
        key = f"profile-{self.model.key}-{self.ranks}"
        return Arm(key, f"{self.model.key}, {self.ranks} ranks, profile", self.ranks, config)

    def optima(self) -> dict[str, Optimum]:
        """Return the optima of the paper's objective on measured times, by how it is read.

        Raises:
            UsageError: if there is no profile, or it is of other settings.
        """
        config, names = self._timed("auto", self.ranks), [cost.name for cost in self.costs]
        subjects = profilefile.subjects_of(config, self.costs, self.pixels)
        profile = profilefile.load(self._profile, subjects, names, self.ranks)
        if isinstance(profile, str):
            raise UsageError(
                f"{self._profile} is a profile of other settings ({profile}): choose another --to"
            )
        known, images = Known(self.costs, *profile), self.images_per_step
        return {
            reading: plans.minimise(known, self.ranks, images, reading) for reading in READINGS
        }

    def timed(self, optimum: Optimum) -> dict[str, Arm]:
        """Return the timed runs by strategy, and write the plans that have no short form.

        Args:
            optimum: of the paper's objective with divided work.

        Raises:
            DataError: if a plan cannot be written.
        """
        arms = {}
        for strategy in STRATEGIES:
            if strategy.name not in TABLE_I and self.model not in self.options.with_accuracy:
                continue
            plan = strategy.plan(self.costs, self.ranks, optimum)
            if plan is None:
                continue
            key = f"{self.model.key}-{strategy.name.replace(' ', '-')}"
            if not isinstance(plan, str):
                plan = plans.write(Path(self.options.to), f"{key}-{self.ranks}", plan)
            ranks = 1 if strategy.name == SINGLE else self.ranks
            name = f"{self.model.key}, {strategy.name}, timed"
            arms[strategy.name] = Arm(
                f"timed-{key}-{ranks}", name, ranks, self._timed(plan, ranks)
            )
        return arms

    def accuracy(self, timed: Mapping[str, Arm]) -> dict[str, Arm]:
        """Return the runs for accuracy by strategy: on real images, and on the most ranks."""
        options = self.options
        is_real = self.data == options.data and self.model in options.with_accuracy
        if not (is_real and options.epochs and self.ranks == options.numbers_of_ranks[-1]):
            return {}
        return {
            name: Arm(
                arm.key.replace("timed", "accuracy", 1),
                f"{self.model.key}, {name}, accuracy",
                arm.ranks,
                replace(self._config(arm.config.plan or ""), epochs=options.epochs),
            )
            for name, arm in timed.items()
            if name in TABLE_I
        }

    @property
    def _profile(self) -> Path:
        return Path(self.options.to) / "profiles" / f"{self.model.key}-{self.ranks}.json"

    def _config(self, plan: str) -> TrainConfig:
        return TrainConfig(
            model=self.model.name,
            data=self.data,
            plan=plan,
            batch_size=self.options.batch_size,
            image_size=self.model.pixels,
        )

    def _timed(self, plan: str, ranks: int) -> TrainConfig:
        """Return the configuration of a timed run.

        Without GPUs a device of the paper is one core, to which a rank is bound if there are
        enough.
        """
        has_gpus = cuda.is_available()
        return replace(
            self._config(plan),
            batch_size=self.images_per_step,
            threads=None if has_gpus else 1,
            bind=not has_gpus and ranks <= devices(),
            max_steps=self.options.steps_of(self.model),
            eval_every=0,
            log_every=1,
        )
