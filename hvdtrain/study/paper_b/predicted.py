"""Predicts table I of paper B for 8 V100, and explains where the paper's numbers are far away.

Everything is a prediction from typical rates of such machines (`planner.clusters`): nothing is
measured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hvdtrain.plan.plan import Plan, replicated
from hvdtrain.planner.candidate import play
from hvdtrain.planner.clusters import Cluster, load, question_of
from hvdtrain.planner.cost import Question
from hvdtrain.planner.strategies import (
    EPOCHS,
    IMAGES,
    PREDICTED,
    Column,
    StrategyTable,
    communication,
    five_columns,
    shape,
)
from hvdtrain.planner.sweep import CHOSEN, Sweep, sweep
from hvdtrain.study.paper_b.claims import GPUS, PUBLISHED, STRATEGIES, Published
from hvdtrain.study.paper_b.settings import CLUSTER, IMAGE_SIZE, SETTINGS, Setting, costs_of
from hvdtrain.study.tables import markdown_table

if TYPE_CHECKING:
    from hvdtrain.models.costs import ComponentCost

FACTOR = 2  # numbers that differ by more are explained
SLOWEST, FASTEST = 1e-4, 1e4  # 1e9 bytes per second between which links are searched
TOLERANCE = 1e-4  # of the logarithm of a bandwidth

# The strategies of the paper under the names that the planner's table and sweep have for them.
COLUMN = {name: name for name in STRATEGIES} | {"adaptive": "chosen"}
IN_SWEEP = {"DP": "dp", "MP": "mp", "hybrid": "hybrid", "adaptive": CHOSEN}


@dataclass(frozen=True)
class Throughput:
    """Published images/s of training on V100 of 32 GB, fp32, 224 pixels."""

    one: float
    eight: float
    source: str


# NVIDIA's measurements on a DGX-1 with 8 V100 of 32 GB, container 21.03.
V100: Mapping[str, Throughput] = {
    "resnet50": Throughput(
        356,
        2766,
        "https://github.com/NVIDIA/DeepLearningExamples/blob/master/PyTorch/Classification/"
        "ConvNets/resnet50v1.5/README.md",
    )
}
V100_TFLOPS = 15.7  # fp32 peak of the V100 with NVLink, NVIDIA's data sheet
NVLINK_GBYTES = 150  # of a V100 in each direction: six links of 25, NVIDIA's data sheet
FORWARDS = 3  # a training step takes as many operations as this many forwards
# 1e9 bytes per second in each direction of links that users know.
LINKS: Mapping[str, float] = {
    "1 Gbit/s Ethernet": 0.125,
    "10 Gbit/s Ethernet": 1.25,
    "25 Gbit/s Ethernet": 3.1,
    "PCIe 3.0 with 16 lanes": 15.75,
    "NVLink of a V100": NVLINK_GBYTES,
}


@dataclass(frozen=True)
class Prediction:
    """The prediction of table I for one model.

    Attributes:
        table: the five columns.
        swept: the strategies on 1, 2, 4, ... ranks.
        parameters: number of parameters.
        forward_flops: operations of a forward per image.
        link_gbytes: 1e9 bytes per second of a link with which DP communicates for the paper's
            share of the time.
        whole_batch_gb: 1e9 bytes that DP needs if each rank has the batch of one GPU.
    """

    model: str
    table: StrategyTable
    swept: Sweep
    parameters: int
    forward_flops: float
    link_gbytes: float
    whole_batch_gb: float

    @property
    def published(self) -> Published:
        """The numbers of the paper."""
        return PUBLISHED[self.model]

    @property
    def strategies(self) -> list[str]:
        """Names of the strategies that are possible on these ranks, as the paper has them."""
        columns = {column.name for column in self.table.columns}
        return [name for name in STRATEGIES if COLUMN[name] in columns]

    def plan(self, strategy: str) -> Plan:
        """Return the plan of a strategy."""
        return self._column(strategy).candidate.plan

    def hours(self, strategy: str) -> float:
        """Return the hours of 100 epochs."""
        return self.table.hours(self._column(strategy))

    def speedup(self, strategy: str) -> float:
        """Return the speed-up over one rank."""
        return self.table.speedup(self._column(strategy))

    def memory_gb(self, strategy: str) -> float:
        """Return the peak memory of the fullest rank in 1e9 bytes."""
        return self._column(strategy).peak_bytes / 1e9

    def communication(self, strategy: str) -> float:
        """Return the part of a step that a network without cost would save, 0 to 1."""
        return self._column(strategy).communication

    def step_seconds(self, strategy: str) -> float:
        """Return the seconds of a step."""
        return self._column(strategy).candidate.seconds

    def images_per_second(self, strategy: str) -> float:
        """Return the throughput."""
        return self.table.batch_size / self.step_seconds(strategy)

    def speedups(self, strategy: str) -> dict[int, float]:
        """Return the speed-up over one rank by number of ranks."""
        return self.swept.speedups(IN_SWEEP[strategy])

    def _column(self, strategy: str) -> Column:
        return next(one for one in self.table.columns if one.name == COLUMN[strategy])


def predict(model: str, ranks: int | None = None, image_size: int = IMAGE_SIZE) -> Prediction:
    """Predict table I for a model.

    Args:
        ranks: all of the cluster's by default.

    Raises:
        UsageError: if no plan fits into memory.
    """
    setting, cluster = SETTINGS[model], load(CLUSTER, ranks)
    costs = costs_of(model, image_size)

    def question(number: int, factor: int = 1) -> Question:
        smaller = replace(cluster, ranks=number)
        return question_of(smaller, costs, factor * setting.batch_size, setting.optimizer)

    names = [cost.name for cost in costs]
    everywhere = replicated(names, cluster.ranks, None, None)
    whole_batch = play(question(cluster.ranks, cluster.ranks), everywhere, "DP")
    share = PUBLISHED[model].communication["DP"]
    return Prediction(
        model=model,
        table=five_columns(model, cluster, question(cluster.ranks)),
        swept=sweep(model, question, cluster.ranks),
        parameters=sum(cost.parameters for cost in costs),
        forward_flops=sum(cost.forward_flops for cost in costs),
        link_gbytes=bandwidth_for(share, cluster, costs, setting),
        whole_batch_gb=max(whole_batch.rank_bytes) / 1e9,
    )


def bandwidth_for(
    share: float, cluster: Cluster, costs: "Sequence[ComponentCost]", setting: Setting
) -> float:
    """Return the 1e9 bytes per second of a link with which DP communicates for `share` of a step.

    The share falls as the bandwidth grows, so bisection finds it.

    Args:
        share: of the time, between 0 and 1.

    Raises:
        ValueError: if no bandwidth between SLOWEST and FASTEST leads to that share.
    """
    slow, fast = math.log(SLOWEST), math.log(FASTEST)
    if not _dp_share(FASTEST, cluster, costs, setting) < share < 1:
        raise ValueError(f"no bandwidth makes DP communicate for {share:.1%} of a step")
    if _dp_share(SLOWEST, cluster, costs, setting) < share:
        raise ValueError(f"even {SLOWEST:g} GB/s is too fast for a share of {share:.1%}")
    while fast - slow > TOLERANCE:
        middle = (slow + fast) / 2
        if _dp_share(math.exp(middle), cluster, costs, setting) > share:
            slow = middle
        else:
            fast = middle
    return math.exp((slow + fast) / 2)


def _dp_share(
    gbytes: float, cluster: Cluster, costs: "Sequence[ComponentCost]", setting: Setting
) -> float:
    question = question_of(
        replace(cluster, gbytes=gbytes), costs, setting.batch_size, setting.optimizer
    )
    plan = replicated([cost.name for cost in costs], cluster.ranks, None, None)
    return communication(question, play(question, plan, "DP"))


@dataclass(frozen=True)
class Quantity:
    """A quantity that both table I and our prediction have, by strategy.

    Attributes:
        form: format of its values.
        cause: returns why the prediction differs from the paper.
    """

    predicted: Callable[[Prediction, str], float]
    published: Callable[[Published, str], float]
    form: str
    cause: Callable[[Prediction], str]

    def far(self, prediction: Prediction) -> list[str]:
        """Return the strategies whose values differ by more than FACTOR, with both values."""
        lines = []
        for strategy in prediction.strategies:
            ours = self.predicted(prediction, strategy)
            paper = self.published(prediction.published, strategy)
            low, high = sorted((ours, paper))
            if high > FACTOR * low:
                ratio = f"{high / low:.3g}x" if low else "no ratio"
                lines.append(
                    f"{strategy} {ours:{self.form}} against {paper:{self.form}} ({ratio})"
                )
        return lines


def _baseline(prediction: Prediction) -> str:
    paper = prediction.published.images_per_second("single")
    operations = FORWARDS * prediction.forward_flops
    part, most = operations * paper / (1e12 * V100_TFLOPS), 1e12 * V100_TFLOPS / operations
    text = (
        f"The paper's hours for one GPU mean {paper:.1f} images/s, {part:.0%} of the "
        f"{V100_TFLOPS} TFLOP/s that a V100 reaches at most in fp32 ({most:.0f} images/s)."
    )
    if rates := V100.get(prediction.model):
        text += (
            f" NVIDIA measured {rates.one:.0f} images/s on one V100 of 32 GB in fp32 and "
            f"{rates.eight:,.0f} on eight ([source]({rates.source}))."
        )
    else:
        text += " No published rate of fp32 training on a V100 is known to us for this model."
    ours = prediction.images_per_second("single")
    return (
        f"{text} We predict {ours:.0f} on one. So something other than the GPU's arithmetic "
        "limits the paper's runs, such as loading images, or its settings differ from ours."
    )


def _scaling(prediction: Prediction) -> str:
    published = prediction.published
    share = published.communication["DP"]
    text = (
        f"The paper's communication of {share:.1%} alone would leave DP a speed-up of "
        f"{GPUS * (1 - share):.1f}; table I has {published.speedup('DP'):.2f}."
    )
    if rates := V100.get(prediction.model):
        text += f" NVIDIA's eight V100 are {rates.eight / rates.one:.2f}x as fast as one."
    return f"{text} The prediction leaves out loading of images, for which ranks share a machine."


def _link(prediction: Prediction) -> str:
    gbytes, cluster = prediction.link_gbytes, prediction.table.cluster
    nearest = min(LINKS, key=lambda name: abs(math.log(LINKS[name] / gbytes)))
    return (
        f"DP communicates for {prediction.published.communication['DP']:.1%} of a step if the "
        f"link has {gbytes:.3g} GB/s. The prediction has {cluster.gbytes:g}, and NVLink up to "
        f"{NVLINK_GBYTES}; the nearest usual link is {nearest} with {LINKS[nearest]:g}. We count "
        "only communication that the backward does not hide; the paper does not say what it "
        "counts."
    )


def _whole_batch(prediction: Prediction) -> str:
    return (
        "In our DP the ranks share the batch of one GPU, and in our pipelines a stage keeps few "
        f"micro-batches. With the whole batch on each rank DP would need "
        f"{prediction.whole_batch_gb:.1f} GB; table I has "
        f"{prediction.published.memory_gb['DP']} GB."
    )


QUANTITIES: Mapping[str, Quantity] = {
    "hours": Quantity(Prediction.hours, lambda paper, name: paper.hours[name], ".3g", _baseline),
    "speed-up": Quantity(Prediction.speedup, Published.speedup, ".2f", _scaling),
    "memory (GB)": Quantity(
        Prediction.memory_gb, lambda paper, name: paper.memory_gb[name], ".1f", _whole_batch
    ),
    "communication": Quantity(
        Prediction.communication, lambda paper, name: paper.communication[name], ".1%", _link
    ),
}


def reasons(prediction: Prediction) -> list[str]:
    """Return one paragraph per quantity that differs from the paper by more than FACTOR."""
    lines = []
    for name, quantity in QUANTITIES.items():
        if far := quantity.far(prediction):
            lines.append(
                f"{name}, predicted against the paper's: {', '.join(far)}. "
                f"{quantity.cause(prediction)}"
            )
    return lines


def table_of(prediction: Prediction) -> str:
    """Return the predicted columns of table I beside the paper's, as a Markdown table."""
    names, rows = prediction.strategies, []
    for title, quantity in QUANTITIES.items():
        form = quantity.form
        ours = [f"{quantity.predicted(prediction, name):{form}}" for name in names]
        paper = [f"{quantity.published(prediction.published, name):{form}}" for name in names]
        rows += [(f"{title}, predicted", ours), (f"{title}, paper", paper)]
    rows.append(("stages x replicas", [shape(prediction.plan(name)) for name in names]))
    return markdown_table(
        [{"": title} | dict(zip(names, values, strict=True)) for title, values in rows]
    )


def speedup_table(prediction: Prediction) -> str:
    """Return the predicted speed-ups by number of ranks as a Markdown table, "-" if impossible."""
    rows = []
    for ranks in prediction.swept.points:
        row = {"ranks": str(ranks)}
        for name in IN_SWEEP:
            value = prediction.speedups(name).get(ranks)
            row[name] = "-" if value is None else f"{value:.2f}"
        rows.append(row)
    return markdown_table(rows)


def section(predictions: Sequence[Prediction]) -> str:
    """Return the predicted part of the report as Markdown."""
    first = predictions[0].table.cluster
    parts = [
        f"## Predicted for {first.ranks} V100",
        f"{PREDICTED} The cluster is the preset {CLUSTER}: {first.gflops / 1000:g} TFLOP/s, "
        f"{first.memory_gib:g} GiB and {first.gbytes:g} GB/s between GPUs. Images have "
        f"{IMAGE_SIZE} pixels, {EPOCHS} epochs have {IMAGES:,} images each, everything is fp32. "
        "The paper states none of this, nor batch and optimizer: the batch is the power of two "
        "whose memory on one GPU is closest to the paper's. All strategies share that batch. "
        f"GB are 1e9 bytes. Numbers that differ by more than {FACTOR}x are explained.",
    ]
    for prediction in predictions:
        setting = SETTINGS[prediction.model]
        parts += [
            f"### {prediction.published.title}: {setting.batch_size} images per step, "
            f"{setting.optimizer}",
            table_of(prediction),
            "Speed-up over one rank by number of ranks, predicted:",
            speedup_table(prediction),
        ]
        if far := reasons(prediction):
            parts.append("\n".join(f"- {line}" for line in far))
    return "\n\n".join(parts)
