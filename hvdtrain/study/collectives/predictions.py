"""Training steps predicted from the times of components and the line fitted to all-reduces.

A prediction simulates the step as the planner does. Nothing of the measured runs is in it.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from hvdtrain import configfile
from hvdtrain.backends.pytorch import measured
from hvdtrain.backends.pytorch.setup import model_components
from hvdtrain.check.plan import MEAN, STD
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import read_index
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files
from hvdtrain.parallel.stage import Images
from hvdtrain.plan.passes import BUCKET_BYTES
from hvdtrain.plan.plan import replicated
from hvdtrain.planner import profilefile, subject
from hvdtrain.planner.agreement import EXACT, reductions
from hvdtrain.planner.candidate import play
from hvdtrain.planner.choose import question
from hvdtrain.planner.cost import Known, reduction_seconds
from hvdtrain.planner.network import Curve, Line
from hvdtrain.study.collectives.arms import Arm
from hvdtrain.study.collectives.cells import Cell, read_result, start_ranks
from hvdtrain.study.runs import make_folder


@dataclass(frozen=True)
class ProfileCell:
    """The times of a model's components, and how much sums and computing delay each other."""

    arm: Arm
    repeat: int

    @property
    def config(self) -> TrainConfig:
        """Return the configuration that is measured, with the library's own algorithm."""
        return replace(self.arm.config(), allreduce="auto")

    @property
    def words(self) -> str:
        """Return the settings that a profile in a file must have."""
        arm, index = self.arm, read_index(self.arm.images)
        return (
            f"{arm.model}, {arm.ranks} ranks, {arm.engine}, {index.classes} classes, "
            f"{index.image_shape[0]} px, {self.config.batch_size} images"
        )

    def path(self, folder: Path) -> Path:
        """Return the file of the profile."""
        name = f"{self.arm.model}-{self.arm.ranks}-{self.arm.engine}-{self.repeat}.json"
        return folder / "profiles" / name

    def cell(self, folder: Path) -> Cell:
        """Return the measurement."""
        path, arm = self.path(folder), self.arm
        return Cell(
            f"components of {arm.model} by {arm.engine} on {arm.ranks} ranks, "
            f"repeat {self.repeat}",
            path,
            lambda: check_words(path, self.words),
            lambda: self._measure(path, folder / "configs"),
        )

    def _measure(self, path: Path, configs: Path) -> None:
        make_folder(path.parent)
        make_folder(configs)
        config = configs / f"profile-{path.stem}.yaml"
        files.write_text(config, configfile.to_yaml(self.config), "the configuration", DataError)
        words = ["profile", str(config), self.words, str(path)]
        start_ranks(self.arm.ranks, words, "auto", path)

    def predictor(self, folder: Path) -> "Predictor":
        """Return predictions from the finished profile."""
        return Predictor(self.config, self.arm.ranks, self.path(folder), self.words)


def check_words(path: Path, words: str) -> None:
    """Raise UsageError if the file holds a profile of other settings."""
    if path.exists() and (saved := read_result(path).get("subject")) != words:
        raise UsageError(
            f"{path} holds a profile of other settings ({saved}): choose another --to"
        )


class Prediction(NamedTuple):
    """Predicted seconds per step.

    Attributes:
        step: of the whole step.
        added: of the all-reduces, as far as the backward does not hide them.
        alone: of the all-reduces one after another, without a backward.
    """

    step: float
    added: float
    alone: float


class Predictor:
    """Predicts steps of one model on one group of ranks from a profile.

    Raises:
        UsageError: if the file is not a profile of these settings.
    """

    def __init__(self, config: TrainConfig, ranks: int, path: Path, words: str) -> None:
        self.config, self.ranks = config, ranks
        trained = subject_of(config)
        self.plan = replicated(trained.names, ranks, None, config.schedule)
        loaded = profilefile.load(path, words, trained.names, ranks)
        if isinstance(loaded, str):
            raise UsageError(
                f"{path} holds a profile of other settings ({loaded}): choose another --to"
            )
        times, self.network = loaded
        self.known = Known(trained.costs, times, self.network, trained.recomputed)

    def step(self, line: Line) -> Prediction:
        """Return the predicted step if an all-reduce takes the seconds of a line."""
        curves = {False: {self.ranks: Curve.straight(line, BUCKET_BYTES)}}
        known = replace(self.known, network=replace(self.network, all_reduce=curves))
        played = play(question(self.config, known, self.ranks), self.plan, "dp")
        added = reduction_seconds(self.plan, played.overview.cut, 0, known)
        sums = reductions(EXACT, known.costs, self.ranks)
        sizes = [operation.size for one in sums for operation in one.traffic.operations]
        alone = sum(line.fixed + line.per_unit * size for size in sizes)
        return Prediction(played.seconds, added, alone)


def subject_of(config: TrainConfig) -> subject.Subject:
    """Return the model of a configuration as the planner measures it, on CPUs."""
    index = read_index(config.data)
    images = Images(MEAN, STD, torch.device("cpu"), config.precision)
    components = model_components(config, index)
    return measured.subject_of(config, components, index.image_shape[0], index.classes, images)
