"""Emulated runs: the measured ranks again, the predicted V100, and devices and links that change.

Emulations run the real program on ranks that sleep (`train --emulate`). Those of the measured
ranks show what an emulation leaves out; those of the V100 check the predictions of table I.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean

import psutil
import yaml

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import INDEX_FILE
from hvdtrain.data.synthetic import synth
from hvdtrain.errors import DataError
from hvdtrain.host import files
from hvdtrain.plan.plan import Plan, replicated
from hvdtrain.planner.candidate import play
from hvdtrain.planner.clusters import Cluster, load
from hvdtrain.planner.cost import Question
from hvdtrain.planner.events import DEVICES, LINKS, Event
from hvdtrain.planner.solve import Solution, solve
from hvdtrain.planner.strategies import pipelines
from hvdtrain.study.paper_b.arms import (
    ADAPTIVE,
    DP,
    HYBRID,
    MP,
    SINGLE,
    Case,
    Compared,
    profile_of,
    written,
)
from hvdtrain.study.paper_b.measured import Measured
from hvdtrain.study.paper_b.options import PaperBOptions
from hvdtrain.study.paper_b.predicted import Prediction
from hvdtrain.study.paper_b.settings import (
    CLASSES,
    CLUSTER,
    IMAGE_SIZE,
    SETTINGS,
    question_for,
)
from hvdtrain.study.results import read
from hvdtrain.study.runs import Arm, make_folder, run_all
from hvdtrain.study.statistics import Estimate
from hvdtrain.training import runrecords

ON_MEASURED = (DP, MP, HYBRID)  # strategies that are emulated on the measured ranks
SIZES = (2, 4, 16, 32, 64)  # ranks on which DP is emulated, besides those of table I
RANK_BYTES = 320 * 2**20  # memory of the process of an emulated rank, by measurement
SIZED = "resnet50"  # model of these runs
CHANGING = "vit_b16"  # model of the runs with events: without batch norm any plan may follow
DILATION = 4.0  # of the runs with events, which are compared with each other
SELDOM = "1000 epochs"  # writing a checkpoint takes real time
PIXELS = 8  # of the images, which emulated ranks read but do not look at
FORESEEN, CHOSEN = "foreseen", "chosen"


@dataclass(frozen=True)
class Change:
    """An event, in the last half of the steps or in all of them."""

    key: str
    title: str
    event: Event | None
    is_late: bool = False

    def cluster(self, steps: int) -> Cluster:
        """Return the V100 with this event, in a run of some steps; from the first one on for 0."""
        if self.event is None:
            return load(CLUSTER)
        start = steps // 2 + 1 if self.is_late and steps else 0
        return replace(load(CLUSTER), events=(replace(self.event, from_step=start),))

    @cached_property
    def phases(self) -> list[Question]:
        """The questions that the planner answers in each part of the run, of equal length."""
        during = question_for(CHANGING, self.cluster(0))
        return [question_for(CHANGING, load(CLUSTER)), during] if self.is_late else [during]

    @cached_property
    def solutions(self) -> list[Solution]:
        """The planner's answers to `phases`."""
        return [solve(question) for question in self.phases]

    @property
    def bound(self) -> float:
        """The predicted seconds per step if each phase has its fastest plan from its start on."""
        return mean(solution.candidates[0].seconds for solution in self.solutions)

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """The plans that do not change, by strategy; the foreseen one suits the event."""
        question = self.phases[-1]
        longest, *hybrids = pipelines(question)
        return {
            DP: replicated(question.known.profile.names, question.ranks, None, None),
            MP: longest,
            HYBRID: min(hybrids, key=self.predicted),
            FORESEEN: self.solutions[-1].chosen.plan,
        }

    def predicted(self, plan: Plan) -> float:
        """Return the predicted seconds per step of a plan that does not change."""
        return mean(play(question, plan, "").seconds for question in self.phases)


CHANGES = (
    Change("quiet", "nothing happens", None),
    Change(
        "throttled",
        "one device at half its speed in the second half",
        Event(DEVICES, 2.0, (7,)),
        is_late=True,
    ),
    Change(
        "congested",
        "the links of one device ten times slower in the second half",
        Event(LINKS, 10.0, (7,)),
        is_late=True,
    ),
    Change(
        "two-kinds",
        "four of the eight devices at half the speed of the others",
        Event(DEVICES, 2.0, (4, 5, 6, 7)),
    ),
)


@dataclass(frozen=True)
class Comparison:
    """A run to emulate, and the seconds per step that it is compared with."""

    model: str
    strategy: str
    arm: Arm
    expected: Estimate


@dataclass(frozen=True)
class Emulated:
    """A finished emulated run.

    Attributes:
        seconds, mean_seconds: emulated, per step: median and mean.
        overhead: real seconds per step of the program itself, the mean of all steps.
        dilation: real seconds per emulated second.
        changes: number of times that the run changed its plan.
    """

    comparison: Comparison
    seconds: float
    mean_seconds: float
    overhead: float
    dilation: float
    changes: int

    @property
    def difference(self) -> float:
        """The part of the expected seconds by which a step takes longer."""
        return self.seconds / self.comparison.expected.value - 1


@dataclass(frozen=True)
class Scenario:
    """A change of the cluster, and the runs of some strategies."""

    change: Change
    runs: Mapping[str, Emulated]


@dataclass(frozen=True)
class Emulations:
    """All emulated runs of the study."""

    measured: Sequence[Emulated]
    v100: Sequence[Emulated]
    sizes: Sequence[Emulated]
    scenarios: Sequence[Scenario]


def emulate(
    options: PaperBOptions,
    on_measured: Sequence[Comparison],
    predictions: Sequence[Prediction],
    say: Callable[[str], object],
) -> Emulations:
    """Make all emulated runs that are not made yet.

    Args:
        on_measured: runs on the measured ranks.
    """

    def run(comparisons: Sequence[Comparison]) -> list[Emulated]:
        folders = run_all([one.arm for one in comparisons], 1, Path(options.to), say)
        return [_read(one, *folders[one.arm.key]) for one in comparisons]

    make_images(options)
    measured, v100, sizes, scenarios = run(on_measured), [], [], []
    if options.emulated_steps:
        of_predictions = [_of_prediction(options, prediction) for prediction in predictions]
        v100 = run([one for comparisons in of_predictions for one in comparisons])
        sizes = run([_of_size(options, ranks) for ranks in sizes_that_fit()])
    if options.event_steps:
        changed = [(change, _during(options, change)) for change in CHANGES]
        runs = iter(run([one for _, comparisons in changed for one in comparisons]))
        scenarios = [
            Scenario(change, {one.strategy: next(runs) for one in comparisons})
            for change, comparisons in changed
        ]
    return Emulations(measured, v100, sizes, scenarios)


def sizes_that_fit() -> list[int]:
    """Return the sizes whose ranks fit into the memory of this machine."""
    memory = psutil.virtual_memory().available
    return [ranks for ranks in SIZES if ranks * RANK_BYTES <= memory]


def make_images(options: PaperBOptions) -> None:
    """Make small images for the emulated V100, as many as the longest run takes in one epoch.

    Each rank keeps its own copy of the data set.

    Raises:
        DataError: if they cannot be written.
    """
    steps = max(options.emulated_steps, options.event_steps)
    if steps and not (_images(options) / INDEX_FILE).exists():
        number = steps * max(setting.batch_size for setting in SETTINGS.values())
        synth(_images(options), number, CLASSES, size=PIXELS)


def _images(options: PaperBOptions) -> Path:
    return Path(options.to) / f"images-{PIXELS}"


def on_measured_ranks(
    options: PaperBOptions, sides: Sequence[Compared], measured: Mapping[Case, Measured]
) -> list[Comparison]:
    """Return the runs on emulated ranks that are as fast as the measured ones."""
    comparisons = []
    for side in sides:
        if side.strategy in ON_MEASURED:
            model, profile = side.case.model.key, str(profile_of(options, side.case))
            config = replace(side.timed.config, emulate=profile, device="cpu", bind=False)
            name = f"{model}, {side.strategy}, emulated"
            arm = replace(side.timed, key=f"emulated-{side.timed.key}", name=name, config=config)
            expected = measured[side.case].step_seconds(side.strategy)
            comparisons.append(Comparison(model, side.strategy, arm, expected))
    return comparisons


def _of_prediction(options: PaperBOptions, prediction: Prediction) -> list[Comparison]:
    """Return the runs of table I's plans on the V100."""
    ranks = prediction.table.cluster.ranks
    comparisons, plans = [], [prediction.plan(SINGLE)]
    for name in prediction.strategies:
        plan, strategy = prediction.plan(name), CHOSEN if name == ADAPTIVE else name
        if plan in plans:
            continue
        plans.append(plan)
        key = f"v100-{prediction.model}-{strategy}-{ranks}"
        path = written(options, key, plan)
        arm = _arm(options, prediction.model, ranks, key, path, options.emulated_steps)
        seconds = Estimate(prediction.step_seconds(name))
        comparisons.append(Comparison(prediction.model, strategy, arm, seconds))
    return comparisons


def _of_size(options: PaperBOptions, ranks: int) -> Comparison:
    """Return the run of DP on another number of V100."""
    cluster = replace(load(CLUSTER), ranks=ranks, ranks_per_node=max(ranks, 8))
    question = question_for(SIZED, cluster)
    plan = replicated(question.known.profile.names, ranks, None, None)
    key = f"v100-{SIZED}-{DP}-{ranks}"
    arm = _arm(options, SIZED, ranks, key, "dp", options.emulated_steps)
    config = replace(arm.config, emulate=_written(options, f"v100-{ranks}", cluster))
    seconds = Estimate(play(question, plan, DP).seconds)
    return Comparison(SIZED, DP, replace(arm, config=config), seconds)


def _during(options: PaperBOptions, change: Change) -> list[Comparison]:
    """Return the runs during a change: DP, the foreseen plan if it is another, and adaptive."""
    steps, plans = options.event_steps, change.plans
    cluster = change.cluster(steps)
    path = _written(options, f"{change.key}-{steps}", cluster)
    key = f"{change.key}-{CHANGING}-{cluster.ranks}"
    values = {DP: "dp", ADAPTIVE: "adaptive"}
    if plans[FORESEEN] != plans[DP]:
        values[FORESEEN] = written(options, f"{key}-{FORESEEN}", plans[FORESEEN])
    comparisons = []
    for strategy, plan in values.items():
        arm = _arm(options, CHANGING, cluster.ranks, f"{key}-{strategy}", plan, steps)
        config = replace(arm.config, emulate=path, emulate_dilation=DILATION)
        seconds = change.bound if strategy == ADAPTIVE else change.predicted(plans[strategy])
        expected = Estimate(seconds)
        comparison = Comparison(CHANGING, strategy, replace(arm, config=config), expected)
        comparisons.append(comparison)
    return comparisons


def _arm(options: PaperBOptions, model: str, ranks: int, key: str, plan: str, steps: int) -> Arm:
    setting = SETTINGS[model]
    config = TrainConfig(
        model=model,
        data=str(_images(options)),
        plan=plan,
        batch_size=setting.batch_size,
        optimizer=setting.optimizer,
        image_size=IMAGE_SIZE,
        threads=1,
        emulate=CLUSTER,
        device="cpu",
        max_steps=steps,
        checkpoint_every=SELDOM,
        eval_every=0,
        log_every=1,
    )
    return Arm(f"emulated-{key}-{steps}", f"{key}, emulated", ranks, config)


def _written(options: PaperBOptions, name: str, cluster: Cluster) -> str:
    """Write a cluster into the folder of the study and return its path."""
    path = Path(options.to) / "clusters" / f"{name}.yaml"
    make_folder(path.parent)
    content = {key: value for key, value in asdict(cluster).items() if value}
    files.write_text(path, yaml.safe_dump(content), "the cluster", DataError)
    return str(path)


def _read(comparison: Comparison, folder: Path) -> Emulated:
    """Return the finished run of a folder.

    Raises:
        DataError: if its files cannot be parsed.
    """
    seconds, summary = read(folder).step_seconds, runrecords.read_summary(folder)
    if summary is None or summary.emulated is None:
        raise DataError(f"{folder} was not emulated: remove it")
    decisions = [line.decision for line in runrecords.read_lines(folder)]
    return Emulated(
        comparison,
        seconds,
        mean_seconds=summary.emulated.step_seconds,
        overhead=summary.emulated.overhead_seconds_per_step,
        dilation=summary.emulated.dilation,
        changes=decisions.count("change"),
    )
