"""Training runs under each library and algorithm, for their seconds per step."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from hvdtrain import data
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import read_index
from hvdtrain.host.launchers import ALGORITHMS
from hvdtrain.options.syncoptions import Algorithm, Library
from hvdtrain.study.collectives.cells import MPI, Cell, free_cores
from hvdtrain.study.collectives.options import StudyOptions
from hvdtrain.study.results import Result, read
from hvdtrain.study.runs import check_same, make_folder, train

STEP_LINES = 12
IMAGES_PER_STEP = 64


@dataclass(frozen=True)
class Arm:
    """Training of a model by one library under one algorithm.

    Attributes:
        images: data set.
    """

    model: str
    ranks: int
    engine: Library
    algorithm: str
    images: str
    steps: int

    @property
    def key(self) -> str:
        """Return the first part of the names of its run folders."""
        return f"{self.model}-{self.ranks}-{self.engine}-{self.algorithm}"

    @property
    def profile_key(self) -> tuple[str, int, str]:
        """Return what its profile depends on."""
        return self.model, self.ranks, self.engine

    def config(self) -> TrainConfig:
        """Return the configuration of its runs, without seed and run folder."""
        return TrainConfig(
            model=self.model,
            data=self.images,
            plan="dp",
            schedule="1f1b",
            max_steps=self.steps,
            eval_every=0,
            batch_size=IMAGES_PER_STEP,
            log_every=max(1, self.steps // STEP_LINES),
            device="cpu",
            reduce_with=self.engine,
            allreduce=cast(Algorithm, self.algorithm),
        )

    def run(self, folder: Path, repeat: int) -> Path:
        """Return a run folder."""
        return folder / "runs" / f"{self.key}-{repeat}"

    def cell(self, folder: Path, repeat: int) -> Cell:
        """Return the measurement of one run."""
        run = self.run(folder, repeat)
        config = replace(self.config(), seed=repeat, run=str(run))
        environment = ALGORITHMS[self.algorithm]
        return Cell(
            f"{self.model} by {self.engine}, {self.algorithm} on {self.ranks} ranks, "
            f"repeat {repeat}",
            run / "summary.json",
            lambda: check_same(config),
            lambda: train(config, self.ranks, folder / "configs", environment),
        )

    def results(self, folder: Path, repeats: int) -> list[Result]:
        """Return the finished runs."""
        return [read(self.run(folder, repeat)) for repeat in range(repeats)]


def step_groups(options: StudyOptions) -> list[int]:
    """Return the numbers of ranks for which steps are measured.

    They are those with a core for each rank, else the smallest.
    """
    fitting = [ranks for ranks in options.groups if ranks <= free_cores()]
    return fitting or options.groups[:1]


def arms(options: StudyOptions, images: str, libraries: list[Library]) -> list[Arm]:
    """Return all arms; MPI alone has no hierarchical all-reduce."""
    return [
        Arm(model, ranks, library, algorithm, images, options.steps_of(model))
        for model in options.model_names
        for ranks in step_groups(options)
        for library in libraries
        for algorithm in options.algorithm_names
        if (library, algorithm) != (MPI, "hierarchical")
    ]


def images_for(options: StudyOptions, folder: Path) -> str:
    """Return the data set of the runs: the user's, or one that is made in the folder."""
    if options.data is not None:
        read_index(options.data)
        return options.data
    steps = max(map(options.steps_of, options.model_names))
    images = IMAGES_PER_STEP * (steps + 1)  # one epoch
    path = folder / f"data-{images}"
    if not path.exists():
        make_folder(folder)
        data.synth(path, images, 10)
    read_index(path)
    return str(path)
