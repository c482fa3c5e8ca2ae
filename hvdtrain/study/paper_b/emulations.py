"""Emulated runs: the measured ranks again, the predicted V100, and devices and links that change.

Emulations run the real program on ranks that sleep (`train --emulate`). Those of the measured
ranks show what an emulation leaves out; those of the V100 check the predictions of table I.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError
from hvdtrain.host import files
from hvdtrain.plan.plan import replicated
from hvdtrain.planner.candidate import play
from hvdtrain.planner.clusters import Cluster, load
from hvdtrain.planner.events import DEVICES, LINKS, Event
from hvdtrain.planner.solve import solve
from hvdtrain.study.paper_b.arms import (
    ADAPTIVE,
    DP,
    HYBRID,
    MP,
    SINGLE,
    Compared,
    synthetic,
    written,
)
from hvdtrain.study.paper_b.measured import Measured
from hvdtrain.study.paper_b.options import PaperBOptions
from hvdtrain.study.paper_b.predicted import Prediction
from hvdtrain.study.paper_b.settings import CLASSES, CLUSTER, IMAGE_SIZE, SETTINGS, question_for
from hvdtrain.study.results import read
from hvdtrain.study.runs import Arm, make_folder, run_all

ON_MEASURED = (DP, MP, HYBRID)  # strategies that are emulated on the measured ranks
SIZES = (2, 4, 16)  # ranks on which the program's own seconds are counted, besides 8
EVENTS_ON = "resnet50"  # model of the runs with events
DILATION = 12.0  # of the runs with events, which are compared with each other
SELDOM = "1000 epochs"  # writing a checkpoint takes real time
LONGER = 4  # factor by which runs with events are longer


@dataclass(frozen=True)
class Change:
    """An event, in the last half of the steps or in all of them."""

    key: str
    title: str
    event: Event | None
    is_late: bool = False

    def cluster(self, steps: int) -> Cluster:
        """Return the V100 with this event, in a run of some steps."""
        if self.event is None:
            return load(CLUSTER)
        start = steps // 2 + 1 if self.is_late else 0
        return replace(load(CLUSTER), events=(replace(self.event, from_step=start),))

    def bound(self) -> float:
        """Return the seconds per step if each phase has the planner's plan for it, at once."""
        before = _best(load(CLUSTER))
        during = _best(self.cluster(0))
        return (before + during) / 2 if self.is_late else during


def _best(cluster: Cluster) -> float:
    """Return the predicted seconds of the planner's plan for the first step."""
    started = tuple(replace(event, from_step=0) for event in cluster.events)
    return solve(question_for(EVENTS_ON, replace(cluster, events=started))).chosen.seconds


CHANGES = (
    Change("quiet", "nothing happens", None),
    Change(
        "throttled",
        "one device at half its speed during the second half",
        Event(DEVICES, 2.0, (7,)),
        is_late=True,
    ),
    Change(
        "congested",
        "the links of one device ten times slower during the second half",
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
    expected: float


@dataclass(frozen=True)
class Emulated:
    """A finished emulated run.

    Attributes:
        seconds, mean_seconds: emulated, per step: median and mean.
        overhead: real seconds per step of the program itself.
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
        return self.seconds / self.comparison.expected - 1


@dataclass(frozen=True)
class Scenario:
    """A change of the cluster, and runs of each strategy."""

    change: Change
    runs: Mapping[str, Emulated]

    @property
    def best_static(self) -> str:
        """The fastest of the strategies that do not change."""
        static = [name for name in self.runs if name != ADAPTIVE]
        return min(static, key=lambda name: self.runs[name].mean_seconds)


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

    measured = run(on_measured)
    if not options.emulated_steps:
        return Emulations(measured, [], [], [])
    v100 = run(
        [
            comparison
            for prediction in predictions
            for comparison in _of_prediction(options, prediction)
        ]
    )
    sizes = run([_of_size(options, ranks) for ranks in SIZES])
    changed = [(change, _during(options, change)) for change in CHANGES]
    runs = iter(run([one for _, comparisons in changed for one in comparisons]))
    scenarios = [
        Scenario(change, {one.strategy: next(runs) for one in comparisons})
        for change, comparisons in changed
    ]
    return Emulations(measured, v100, sizes, scenarios)


def on_measured_ranks(
    sides: Sequence[Compared], profiles: Mapping[str, Path], measured: Mapping[str, Measured]
) -> list[Comparison]:
    """Return the runs on emulated ranks that are as fast as the measured ones.

    Args:
        profiles, measured: by model.
    """
    comparisons = []
    for side in sides:
        if side.strategy in ON_MEASURED:
            model = side.model.key
            config = replace(side.timed.config, emulate=str(profiles[model]), device="cpu")
            name = f"{model}, {side.strategy}, emulated"
            arm = replace(side.timed, key=f"emulated-{side.timed.key}", name=name, config=config)
            comparisons.append(
                Comparison(model, side.strategy, arm, measured[model].seconds(side.strategy))
            )
    return comparisons


def _of_prediction(options: PaperBOptions, prediction: Prediction) -> list[Comparison]:
    """Return the runs of table I's plans on the V100."""
    ranks = prediction.table.cluster.ranks
    comparisons = []
    for strategy in prediction.strategies:
        if strategy != SINGLE:
            key = f"{prediction.model}-{strategy}-{ranks}"
            plan = written(options, f"v100-{key}", prediction.plan(strategy))
            arm = _arm(options, prediction.model, strategy, ranks, f"v100-{key}", plan)
            comparisons.append(
                Comparison(prediction.model, strategy, arm, prediction.step_seconds(strategy))
            )
    return comparisons


def _of_size(options: PaperBOptions, ranks: int) -> Comparison:
    """Return the run of DP on another number of V100."""
    cluster = replace(load(CLUSTER), ranks=ranks, ranks_per_node=max(ranks, 8))
    question = question_for(EVENTS_ON, cluster)
    plan = replicated(list(question.known.profile.names), ranks, None, None)
    arm = _arm(options, EVENTS_ON, DP, ranks, f"v100-{EVENTS_ON}-{DP}-{ranks}", "dp")
    arm = replace(
        arm, config=replace(arm.config, emulate=_written(options, f"v100-{ranks}", cluster))
    )
    return Comparison(EVENTS_ON, DP, arm, play(question, plan, DP).seconds)


def _during(options: PaperBOptions, change: Change) -> list[Comparison]:
    """Return the runs of each strategy during a change."""
    steps = LONGER * options.emulated_steps
    cluster = change.cluster(steps)
    path = _written(options, f"{change.key}-{steps}", cluster)
    plans = {DP: "dp", ADAPTIVE: "adaptive"}
    if change.event is not None:
        plans |= {MP: "mp", HYBRID: f"hp:2x{cluster.ranks // 2}"}
    bound, comparisons = change.bound(), []
    for strategy, plan in plans.items():
        key = f"{change.key}-{EVENTS_ON}-{strategy}-{cluster.ranks}"
        arm = _arm(options, EVENTS_ON, strategy, cluster.ranks, key, plan)
        config = replace(arm.config, emulate=path, emulate_dilation=DILATION, max_steps=steps)
        comparisons.append(Comparison(EVENTS_ON, strategy, replace(arm, config=config), bound))
    return comparisons


def _arm(
    options: PaperBOptions, model: str, strategy: str, ranks: int, key: str, plan: str
) -> Arm:
    setting = SETTINGS[model]
    config = TrainConfig(
        model=model,
        data=synthetic(options, IMAGE_SIZE, CLASSES),
        plan=plan,
        batch_size=setting.batch_size,
        optimizer=setting.optimizer,
        image_size=IMAGE_SIZE,
        threads=1,
        emulate=CLUSTER,
        device="cpu",
        max_steps=options.emulated_steps,
        checkpoint_every=SELDOM,
        eval_every=0,
        log_every=1,
    )
    return Arm(f"emulated-{key}", f"{key}, emulated", ranks, config)


def _written(options: PaperBOptions, name: str, cluster: Cluster) -> str:
    """Write a cluster into the folder of the study and return its path."""
    path = Path(options.to) / "clusters" / f"{name}.yaml"
    make_folder(path.parent)
    content: dict[str, Any] = {key: value for key, value in asdict(cluster).items() if value}
    if cluster.events:
        content["events"] = [_as_content(event) for event in cluster.events]
    files.write_text(path, yaml.safe_dump(content), "the cluster", DataError)
    return str(path)


def _as_content(event: Event) -> dict[str, Any]:
    values = {"slows": event.slows, "factor": event.factor, "from_step": event.from_step}
    return values if event.ranks is None else values | {"ranks": list(event.ranks)}


def _read(comparison: Comparison, folder: Path) -> Emulated:
    """Return the finished run of a folder.

    Raises:
        DataError: if its files cannot be parsed.
    """
    seconds = read(folder).step_seconds
    report = json.loads((folder / "summary.json").read_text())["emulated"]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    plans = [line for line in map(json.loads, lines) if line["event"] == "plan"]
    return Emulated(
        comparison,
        seconds,
        mean_seconds=report["step_seconds"],
        overhead=report["overhead_seconds_per_step"],
        dilation=report["dilation"],
        changes=sum(a["stages"] != b["stages"] for a, b in pairwise(plans)),
    )
