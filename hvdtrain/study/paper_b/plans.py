"""The strategies of paper B as plans and runs, its objective, and its claims.

The paper names strategies by component: DP on all devices, MP partitioned over devices, HP on
some. A plan puts whole components on ranks, so MP means one rank here.

Its objective: minimise over the strategy s of each component c the sum of t_comp(c) +
t_comm(c, s), s being DP, MP or HP. In print t_comp does not depend on the strategy. The other
reading is that DP and HP divide the work: the time of a component is then that of its busiest
rank. Both add up components that our simulation overlaps. The memory of a device limits nothing
at these sizes.

Baligodugula and Amsaad, "Optimizing Distributed Training Approaches for Scaling Neural Networks",
arXiv 2503.23186, 2025: CIFAR-100 on 8 V100 of 32 GB with NVLink, 100 epochs. Its numbers, its
contradictions, and its claims judged by measurements are here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

from torch import cuda

from hvdtrain import models
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Index
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files
from hvdtrain.models.costs import ComponentCost, component_costs
from hvdtrain.plan.plan import Plan, Stage, pipeline
from hvdtrain.planner import profilefile
from hvdtrain.planner.assign import assign, groups_of, paper_prices
from hvdtrain.planner.cost import Known, Question
from hvdtrain.planner.strategies import EPOCHS, IMAGES
from hvdtrain.study.laws import Estimate, difference, equivalence, is_shown, median, ratio
from hvdtrain.study.options import ModelAtSize, PaperBOptions, devices
from hvdtrain.study.results import Result
from hvdtrain.study.runs import Arm, make_folder

TABLE_I = ("single", "DP", "MP", "hybrid", "adaptive")
SINGLE, DP, MP, HYBRID, ADAPTIVE = TABLE_I
FIGURE_6, OBJECTIVE = "figure 6", "objective"
HEAVY = 0.5  # part of all parameters that the tail on one rank holds at least
AS_PRINTED, DIVIDED = "as printed", "with divided work"
READINGS = (AS_PRINTED, DIVIDED)
EXACT_WIDTH = 4096  # partial assignments: more than the undominated ones on up to 4 ranks
Group = tuple[int, ...]


@dataclass(frozen=True)
class Optimum:
    """The strategies that minimise the objective.

    Attributes:
        groups: the ranks of each component, by its name in model order.
        seconds: value of the objective.
    """

    groups: Mapping[str, Group]
    seconds: float

    def same_as(self, ranks: int) -> str | None:
        """Return the strategy that the optimum is the same as; OBJECTIVE for a plan of its own.

        None if it leaves ranks idle, which a plan may not.
        """
        groups = set(self.groups.values())
        if groups == {tuple(range(ranks))}:
            return DP
        if len(groups) == 1 and len(*groups) == 1:
            return SINGLE
        used = {rank for group in groups for rank in group}
        return OBJECTIVE if len(used) == ranks else None


def minimise(question: Question, divides: bool) -> Optimum:
    """Return the exact optimum of the objective.

    Args:
        divides: whether DP and HP divide the work of a component.
    """
    groups = groups_of(question.ranks)
    (best,) = assign(paper_prices(question, groups, divides), EXACT_WIDTH, all_ranks=False)
    names = question.known.profile.names
    held = {name: groups[group] for name, group in zip(names, best.groups, strict=True)}
    return Optimum(held, best.seconds)


def hybrid(costs: Sequence[ComponentCost], ranks: int) -> Plan:
    """Return the hybrid plan: two stages of several ranks each, or on few ranks a heavy tail.

    With four ranks or more and an even number, each of two stages has half of the ranks. On fewer,
    the paper's text is followed, which gives "parameter-heavy layers" to MP: the shortest tail
    with half of the parameters is on the last rank, and all else on all ranks.
    """
    names = [cost.name for cost in costs]
    if ranks >= 4 and ranks % 2 == 0:
        work = [cost.forward_flops for cost in costs]
        return pipeline(names, work, ranks, 2, ranks // 2, None, "1f1b", f"hp:2x{ranks // 2}")
    heavy, held = len(costs), 0
    total = sum(cost.parameters for cost in costs)
    while heavy > 1 and held < HEAVY * total:
        heavy -= 1
        held += costs[heavy].parameters
    everybody, last = tuple(range(ranks)), (ranks - 1,)
    return staged({name: everybody if names.index(name) < heavy else last for name in names})


def figure_6(names: Sequence[str], ranks: int) -> Plan | None:
    """Return the plan with figure 6's labels: attention MP, MLP DP, embedding HP.

    The ranks take turns with the attentions. HP is half of the ranks, or both of two. The head,
    which figure 6 does not show, is DP. None if the model has no attention components.
    """
    attentions = [name for name in names if name.endswith(".attention")]
    if not attentions:
        return None
    everybody = tuple(range(ranks))
    held = dict.fromkeys(names, everybody)
    held[names[0]] = everybody if ranks < 4 else everybody[: ranks // 2]
    return staged(held | {name: (place % ranks,) for place, name in enumerate(attentions)})


def staged(groups: Mapping[str, Group], microbatches: int = 2) -> Plan:
    """Return the plan whose neighbouring components on the same ranks form a stage."""
    stages = [
        Stage(tuple(name for name, _ in held), ranks, (1,) * len(ranks))
        for ranks, held in groupby(groups.items(), key=itemgetter(1))
    ]
    return Plan(tuple(stages), microbatches=microbatches)


def write(folder: Path, name: str, plan: Plan) -> str:
    """Write a plan into the folder of the study and return its path.

    Raises:
        DataError: if it cannot be written.
    """
    path = folder / "plans" / f"{name}.json"
    make_folder(path.parent)
    files.write_text(path, json.dumps(plan.to_json(), indent=1) + "\n", "the plan", DataError)
    return str(path)


# Accuracy is measured for those of table I only.
STRATEGIES = {
    SINGLE: "all components on one rank",
    DP: "all components on all ranks",
    MP: "a pipeline of one stage per rank",
    HYBRID: "two stages of half of the ranks each, or on fewer than four ranks the tail with half "
    "of the parameters on one rank and the rest on all",
    FIGURE_6: "the labels of that figure, except that HP is all ranks if they are fewer than four",
    OBJECTIVE: "the optimum of the paper's objective with divided work, if no other row is the "
    "same",
    ADAPTIVE: "what the planner chooses, again during training",
}


def plan_of(
    strategy: str, costs: Sequence[ComponentCost], ranks: int, optimum: Optimum
) -> str | Plan | None:
    """Return a value of `--plan`, or a plan, for a strategy; None if it has none there.

    Args:
        costs: of the components of the model.
        optimum: of the paper's objective with divided work.
    """
    if strategy == HYBRID:
        return hybrid(costs, ranks) if len(costs) > 1 else None
    if strategy == FIGURE_6:
        return figure_6([cost.name for cost in costs], ranks)
    if strategy == OBJECTIVE:
        return staged(optimum.groups, 1) if optimum.same_as(ranks) == OBJECTIVE else None
    return None if strategy == MP and len(costs) == 1 else strategy.lower()


SYNTHETIC = 1024  # images of a size that the packed ones do not have
# Operations of a forward of all images of a step, at most, unless it has fewer than LEAST_IMAGES.
MOST_WORK, LEAST_IMAGES = 8e10, 8


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
        question = Question(known, images, config.optimizer)
        return {reading: minimise(question, reading == DIVIDED) for reading in READINGS}

    def timed(self, optimum: Optimum) -> dict[str, Arm]:
        """Return the timed runs by strategy, and write the plans that have no short form.

        Args:
            optimum: of the paper's objective with divided work.

        Raises:
            DataError: if a plan cannot be written.
        """
        arms = {}
        for name in STRATEGIES:
            plan = plan_of(name, self.costs, self.ranks, optimum)
            if plan is None:
                continue
            key = f"{self.model.key}-{name.replace(' ', '-')}"
            if not isinstance(plan, str):
                plan = write(Path(self.options.to), f"{key}-{self.ranks}", plan)
            ranks = 1 if name == SINGLE else self.ranks
            title = f"{self.model.key}, {name}, timed"
            arms[name] = Arm(f"timed-{key}-{ranks}", title, ranks, self._timed(plan, ranks))
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


GPUS = 8
POINTS = 0.5  # within which the paper says that final accuracies lie, in points of per cent
HOURS, SPEEDUP, MEMORY, COMMUNICATION = "hours", "speed-up", "memory (GB)", "communication"
ACCURACY = "accuracy"
Values = Mapping[str, Mapping[str, float]]  # by quantity, and then by strategy


@dataclass(frozen=True)
class Published:
    """Table I for one model, and the settings that we predict it with.

    The paper states neither batch nor optimizer. The batch is the power of two with which the
    memory that we predict for one GPU is closest to that of table I. Optimizers are the usual
    ones of these models.

    Attributes:
        values: hours, GB of 1e9 bytes, per cent of accuracy, and the share of time spent in
            communication, 0 to 1.
    """

    title: str
    batch_size: int
    optimizer: Literal["sgd", "adamw"]
    values: Values


def _table(*rows: Sequence[float]) -> Values:
    """Return the values of table I, with the speed-ups that its hours mean."""
    names = (HOURS, ACCURACY, MEMORY, COMMUNICATION)
    speedups = [rows[0][0] / hours for hours in rows[0]]
    return {
        name: dict(zip(TABLE_I, row, strict=True))
        for name, row in zip((*names, SPEEDUP), (*rows, speedups), strict=True)
    }


PUBLISHED: Mapping[str, Published] = {
    "resnet50": Published(
        "ResNet-50",
        128,
        "sgd",
        _table(
            (24.6, 8.2, 12.8, 7.6, 6.5),
            (78.2, 77.9, 78.1, 78.0, 78.3),
            (12.8, 14.2, 5.6, 7.8, 8.2),
            (0.0, 0.423, 0.186, 0.325, 0.271),
        ),
    ),
    "vit_b16": Published(
        "ViT-B/16",
        256,
        "adamw",
        _table(
            (38.4, 14.6, 18.2, 13.2, 11.9),
            (81.5, 81.2, 81.4, 81.3, 81.6),
            (28.4, 30.1, 9.8, 12.4, 13.6),
            (0.0, 0.387, 0.224, 0.298, 0.253),
        ),
    ),
}

CONTRADICTIONS = (
    "The text says that adaptive is 1.18x (ResNet-50) and 1.15x (ViT-B/16) faster than static "
    "hybrid; by table I it is 1.17x and 1.11x.",
    "The text says that hybrid is 3.2x faster than one GPU; by table I it is 3.24x for "
    "ResNet-50, but 2.91x for ViT-B/16.",
    "The text says that DP is near-linear up to 4 GPUs; by table I it is 3.00x (ResNet-50) and "
    "2.63x (ViT-B/16) on 8 GPUs, less than a linear speed-up on 4.",
    'The text says that "parameter-heavy layers" get MP; figure 6 gives the MLPs, which hold '
    "most of the parameters of a ViT, DP.",
    "The text says that the gain of adaptive grows with the model; by table I each of its ratios "
    "is smaller for ViT-B/16 than for ResNet-50: 3.23 against 3.78 over one GPU, 1.23 against "
    "1.26 over DP, 1.11 against 1.17 over hybrid.",
    "Table I's communication does not explain its hours: without it, DP's 8 GPUs compute 37.9 "
    "GPU-hours (ResNet-50) and 71.6 (ViT-B/16) for the work that one GPU does in 24.6 and 38.4 "
    "hours.",
    "With identical hyperparameters 8 GPUs share the batch of one, and need less memory; by table "
    "I DP needs more than one GPU: 14.2 against 12.8 GB (ResNet-50), 30.1 against 28.4 GB "
    "(ViT-B/16). So each GPU may have had a whole batch.",
)
# Where table I and our prediction for 8 V100 differ by more than 2x.
EXPLANATIONS = (
    "hours: the paper's hours for one GPU mean 56.5 images/s (ResNet-50) and 36.2 (ViT-B/16), 9% "
    "and 24% of the 15.7 TFLOP/s that a V100 reaches at most in fp32 (NVIDIA's data sheet). "
    "NVIDIA measured 356 images/s of ResNet-50 on one V100 of 32 GB in fp32 and 2,766 on eight "
    "([source](https://github.com/NVIDIA/DeepLearningExamples/blob/master/PyTorch/Classification/"
    "ConvNets/resnet50v1.5/README.md)); no published rate of fp32 training of ViT-B/16 is known "
    "to us. So something other than the GPU's arithmetic limits the paper's runs, such as loading "
    "images, or its settings differ from ours.",
    "speed-up: the paper's communication of 42.3% and 38.7% alone would leave DP a speed-up of "
    "4.6 and 4.9; table I has 3.00 and 2.63. NVIDIA's eight V100 are 7.77x as fast as one. The "
    "prediction leaves out loading of images, for which ranks share a machine.",
    "memory: in our DP the ranks share the batch of one GPU, and in our pipelines a stage keeps "
    "few micro-batches. With the whole batch on each rank DP would need 14.1 and 31.8 GB; table I "
    "has 14.2 and 30.1 GB.",
    "communication: DP communicates for 42.3% and 38.7% of a step if the link has 2.14 and 1.04 "
    "GB/s, about that of 25 and 10 Gbit/s Ethernet. The prediction has 60, and NVLink up to 150 "
    "(NVIDIA's data sheet). We count only communication that the backward does not hide; the "
    "paper does not say what it counts.",
)
UNSTATED = (
    "The paper does not state the batch size, optimizer, learning rate, precision, image size, "
    "augmentation, number of repeats, or the shapes of MP and hybrid."
)


@dataclass(frozen=True)
class Measured:
    """The finished runs of one model by strategy.

    Attributes:
        accuracy: empty if accuracy was left out.
        optima: of the paper's objective, by how it is read.
    """

    model: str
    ranks: int
    timed: Mapping[str, Sequence[Result]]
    accuracy: Mapping[str, Sequence[Result]]
    optima: Mapping[str, Optimum] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return the name in the report."""
        return f"{self.model}, {self.ranks} ranks"

    def hours(self, strategy: str) -> list[float]:
        """Return the hours of the paper's epochs, extrapolated from the step of each run."""
        return [
            -(-IMAGES // run.batch_size) * EPOCHS * run.step_seconds / 3600
            for run in self.timed[strategy]
        ]

    def speedup(self, strategy: str, base: str) -> Estimate:
        """Return how many times faster a strategy is than another one."""
        return ratio(self.hours(base), self.hours(strategy))

    def memory_bytes(self, strategy: str) -> list[float]:
        """Return the peak memory of each run, that of the rank that uses most."""
        return [float(run.peak_memory_bytes) for run in self.timed[strategy]]

    def accuracies(self, strategy: str) -> list[float]:
        """Return the test accuracy of each run."""
        return [run.accuracy for run in self.accuracy[strategy] if run.accuracy is not None]

    @property
    def values(self) -> Values:
        """Return the medians of what table I has."""
        return {
            HOURS: {name: median(self.hours(name)).value for name in self.timed},
            MEMORY: {name: median(self.memory_bytes(name)).value / 1e9 for name in self.timed},
            COMMUNICATION: {
                name: median([run.exposed / run.train_seconds for run in runs]).value
                for name, runs in self.timed.items()
            },
        }

    def points_apart(self, strategy: str) -> Estimate:
        """Return the points of accuracy by which a strategy differs from one rank."""
        values, single = self.accuracies(strategy), self.accuracies(SINGLE)
        return difference([100 * one for one in values], [100 * one for one in single])

    def is_equivalent(self, strategy: str) -> bool:
        """Return whether the accuracy is shown to be within POINTS of that of one rank."""
        values, single = self.accuracies(strategy), self.accuracies(SINGLE)
        return is_shown(equivalence(values, single, POINTS / 100))
