"""The paper's 8 V100: table I predicted, and emulated while devices or links change.

Predictions are from typical rates of such machines (`planner.clusters`): nothing is measured.
Emulations run the real program on ranks that sleep (`train --emulate`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean

import yaml

from hvdtrain import models
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import INDEX_FILE
from hvdtrain.data.sources import synth
from hvdtrain.errors import DataError
from hvdtrain.host import files
from hvdtrain.models.costs import ComponentCost, component_costs
from hvdtrain.plan.plan import Plan, replicated
from hvdtrain.planner.candidate import play
from hvdtrain.planner.clusters import DEVICES, LINKS, Cluster, Event, load, question_of
from hvdtrain.planner.cost import Question
from hvdtrain.planner.solve import Solution, solve
from hvdtrain.planner.strategies import EPOCHS, IMAGES, PREDICTED, five_columns, pipelines, shape
from hvdtrain.study.laws import markdown_table
from hvdtrain.study.options import PaperBOptions
from hvdtrain.study.paper_b import plans
from hvdtrain.study.paper_b.plans import (
    ADAPTIVE,
    COMMUNICATION,
    DP,
    EXPLANATIONS,
    HOURS,
    HYBRID,
    MEMORY,
    MP,
    PUBLISHED,
    SPEEDUP,
    Values,
)
from hvdtrain.study.runs import Arm, make_folder, run_all
from hvdtrain.training import metrics

CLUSTER = "8-v100"
CLASSES = 100  # CIFAR-100
IMAGE_SIZE = 224  # the paper's images/s would be far too few for a V100 at 32 pixels
COLUMNS = {"DP": DP, "MP": MP, "hybrid": HYBRID, "chosen": ADAPTIVE}
FORMATS = {HOURS: ".3g", SPEEDUP: ".2f", MEMORY: ".1f", COMMUNICATION: ".1%"}

MODEL = "vit_b16"  # without batch norm any plan may follow
DILATION = 4.0  # real seconds per emulated one: runs are compared with each other
SELDOM = "1000 epochs"  # writing a checkpoint takes real time
PIXELS = 8  # of the images, which emulated ranks read but do not look at
FORESEEN = "foreseen"
ABOUT = (
    f"{MODEL} on {CLUSTER} while devices or links change, {DILATION:g} real seconds per emulated "
    "one (`--emulate`). Milliseconds are means over all steps, adaptive's migrations included; "
    f"those in brackets are predicted. The {FORESEEN} plan is the planner's for the changed "
    "cluster, kept from the first step on. The bound is predicted: the fastest plan of each "
    "phase, from the first step of the phase on."
)


@dataclass(frozen=True)
class Prediction:
    """The prediction of table I for one model.

    Attributes:
        plans: by strategy; those that are possible on these ranks.
        values: what table I has.
        speedups: over one rank, by strategy and number of ranks.
    """

    model: str
    plans: Mapping[str, Plan]
    values: Values
    speedups: Mapping[str, Mapping[int, float]]


def question_for(model: str, cluster: Cluster, costs: Sequence[ComponentCost]) -> Question:
    """Return the question of table I for a model, on a cluster.

    Args:
        costs: of the model's components.
    """
    row = PUBLISHED[model]
    return question_of(cluster, costs, row.batch_size, row.optimizer)


def costs_of(model: str) -> list[ComponentCost]:
    """Return the costs of the components of a model of table I."""
    components = models.components(model, CLASSES, IMAGE_SIZE)
    return list(component_costs(components, IMAGE_SIZE, classes=CLASSES))


def predict(model: str) -> Prediction:
    """Predict table I for a model.

    Raises:
        UsageError: if no plan fits into memory.
    """
    cluster, costs = load(CLUSTER), costs_of(model)

    tables = {}
    for ranks in (1, 2, 4, cluster.ranks):
        question = question_for(model, replace(cluster, ranks=ranks), costs)
        tables[ranks] = {COLUMNS.get(one.name, one.name): one for one in five_columns(question)}
    columns = tables[cluster.ranks]
    speedups: dict[str, dict[int, float]] = {name: {} for name in COLUMNS.values()}
    for ranks, by_name in tables.items():
        for name in speedups.keys() & by_name.keys():
            speedups[name][ranks] = by_name[name].speedup
    return Prediction(
        model,
        {name: one.candidate.plan for name, one in columns.items()},
        {
            HOURS: {name: one.hours for name, one in columns.items()},
            SPEEDUP: {name: one.speedup for name, one in columns.items()},
            MEMORY: {name: one.peak_bytes / 1e9 for name, one in columns.items()},
            COMMUNICATION: {name: one.communication for name, one in columns.items()},
        },
        speedups,
    )


def predicted_section(predictions: Sequence[Prediction]) -> str:
    """Return the predicted part of the report as Markdown."""
    cluster = load(CLUSTER)
    parts = [
        f"## Predicted for {cluster.ranks} V100",
        f"{PREDICTED} The cluster is the preset {CLUSTER}: {cluster.gflops / 1000:g} TFLOP/s, "
        f"{cluster.memory_gib:g} GiB and {cluster.gbytes:g} GB/s between GPUs. Images have "
        f"{IMAGE_SIZE} pixels, {EPOCHS} epochs have {IMAGES:,} images each, everything is fp32. "
        "The paper states none of this, nor batch and optimizer: the batch is the power of two "
        "whose memory on one GPU is closest to the paper's. All strategies share that batch. "
        "GB are 1e9 bytes.",
    ]
    for prediction in predictions:
        paper = PUBLISHED[prediction.model]
        rows = []
        for quantity, form in FORMATS.items():
            for source, values in (("predicted", prediction.values), ("paper", paper.values)):
                cells = {name: f"{values[quantity][name]:{form}}" for name in prediction.plans}
                rows.append({"": f"{quantity}, {source}"} | cells)
        shapes = {name: shape(plan) for name, plan in prediction.plans.items()}
        rows.append({"": "stages x replicas"} | shapes)
        title = f"### {paper.title}: {paper.batch_size} images per step, {paper.optimizer}"
        parts += [title, markdown_table(rows)]
    parts += ["### Why the paper differs", "\n".join(f"- {line}" for line in EXPLANATIONS)]
    return "\n\n".join(parts)


@dataclass(frozen=True)
class Change:
    """An event, in the last half of the steps or in all of them."""

    key: str
    title: str
    event: Event | None = None
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
        costs, during = costs_of(MODEL), self.cluster(0)
        clusters = [load(CLUSTER), during] if self.is_late else [during]
        return [question_for(MODEL, cluster, costs) for cluster in clusters]

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

    def arms(self, options: PaperBOptions) -> dict[str, Arm]:
        """Return the runs by strategy: DP, adaptive, and the foreseen plan if it is another.

        Raises:
            DataError: if the cluster or a plan cannot be written.
        """
        folder, steps, ranks = Path(options.to), options.event_steps, load(CLUSTER).ranks
        path = folder / "clusters" / f"{self.key}-{steps}.yaml"
        make_folder(path.parent)
        cluster = {key: value for key, value in asdict(self.cluster(steps)).items() if value}
        files.write_text(path, yaml.safe_dump(cluster), "the cluster", DataError)
        key = f"{self.key}-{MODEL}-{ranks}"
        values = {DP: "dp", ADAPTIVE: "adaptive"}
        if self.plans[FORESEEN] != self.plans[DP]:
            values[FORESEEN] = plans.write(folder, f"{key}-{FORESEEN}", self.plans[FORESEEN])
        config = TrainConfig(
            model=MODEL,
            data=str(folder / f"images-{PIXELS}"),
            batch_size=PUBLISHED[MODEL].batch_size,
            optimizer=PUBLISHED[MODEL].optimizer,
            image_size=IMAGE_SIZE,
            threads=1,
            emulate=f"{path}:{DILATION:g}",
            device="cpu",
            max_steps=steps,
            checkpoint_every=SELDOM,
            eval_every=0,
            log_every=1,
        )
        return {
            name: Arm(
                f"emulated-{key}-{name}-{steps}",
                f"{key}-{name}, emulated",
                ranks,
                replace(config, plan=plan),
            )
            for name, plan in values.items()
        }


CHANGES = (
    Change("quiet", "nothing happens"),
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
class Emulated:
    """A finished emulated run.

    Attributes:
        seconds: emulated, per step, the mean.
        own_seconds: of the program itself, per step and on the emulated scale.
        changes: number of times that the run changed its plan.
    """

    seconds: float
    own_seconds: float
    changes: int


Emulations = Sequence[tuple[Change, Mapping[str, Emulated]]]  # the runs of each change by strategy


def emulate(options: PaperBOptions, say: Callable[[str], object]) -> Emulations:
    """Make all emulated runs that are not made yet.

    Raises:
        DataError: if a file cannot be written, or those of a run cannot be parsed.
    """
    if not options.event_steps:
        return []
    folder = Path(options.to)
    images = folder / f"images-{PIXELS}"
    if not (images / INDEX_FILE).exists():
        # Enough for one epoch: each rank keeps its own copy.
        synth(images, options.event_steps * PUBLISHED[MODEL].batch_size, CLASSES, size=PIXELS)
    arms = [(change, change.arms(options)) for change in CHANGES]
    folders = run_all([arm for _, of in arms for arm in of.values()], 1, folder, say)

    def result(arm: Arm) -> Emulated:
        (run,) = folders[arm.key]
        summary = metrics.read_summary(run)
        if summary is None or summary.emulated is None:
            raise DataError(f"{run} was not emulated: remove it")
        emulated = summary.emulated
        decisions = [line.decision for line in metrics.read_lines(run)]
        overhead = emulated.overhead_seconds_per_step / emulated.dilation
        return Emulated(emulated.step_seconds, overhead, decisions.count("change"))

    return [(change, {name: result(arm) for name, arm in of.items()}) for change, of in arms]


def emulated_section(emulations: Emulations) -> str:
    """Return the emulated part of the report as Markdown."""
    if not emulations:
        return "## Emulated: devices and links that change\n\nLeft out by `--event-steps 0`."
    rows = []
    for change, runs in emulations:
        row = {"what happens": change.title}
        for name, plan in change.plans.items():
            measured = f"{1e3 * runs[name].seconds:.1f} " if name in runs else ""
            row[name] = f"{measured}({1e3 * change.predicted(plan):.1f})"
        row[ADAPTIVE] = f"{1e3 * runs[ADAPTIVE].seconds:.1f}"
        row["bound"] = f"({1e3 * change.bound:.1f})"
        row["changes of the plan"] = str(runs[ADAPTIVE].changes)
        rows.append(row)
    return "\n\n".join(
        [
            "## Emulated: devices and links that change",
            ABOUT,
            markdown_table(rows),
            "\n".join(f"- {verdict(change, runs)}" for change, runs in emulations),
        ]
    )


def verdict(change: Change, runs: Mapping[str, Emulated]) -> str:
    """Return how adaptive compares with the plans that do not change, and with the bound."""
    adaptive = runs[ADAPTIVE]
    if change.event is None:
        kept = "changes its plan without a reason" if adaptive.changes else "keeps its plan"
        return f"{change.title}: adaptive {kept}."
    predicted = {name: change.predicted(change.plans[name]) for name in (DP, MP, HYBRID)}
    best = min(predicted, key=lambda name: predicted[name])
    seconds = runs[best].seconds if best in runs else predicted[best]
    text = (
        f"{change.title}: adaptive is {seconds / adaptive.seconds:.2f}x as fast as {best}, the "
        "best of DP, MP and hybrid"
    )
    if foreseen := runs.get(FORESEEN):
        ratio = foreseen.seconds / adaptive.seconds
        text += f", and {ratio:.2f}x as fast as the {FORESEEN} plan"
    return (
        f"{text}. It reaches {change.bound / adaptive.seconds:.0%} of the bound, "
        f"{(change.bound + adaptive.own_seconds) / adaptive.seconds:.0%} if the program's own "
        f"time, {1e3 * adaptive.own_seconds:.1f} ms, is added to it; the bound is "
        f"{seconds / change.bound:.2f}x as fast as {best}."
    )
