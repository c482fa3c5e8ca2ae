"""The numbers of paper B, its contradictions, and its claims judged by measurements.

Baligodugula and Amsaad, "Optimizing Distributed Training Approaches for Scaling Neural Networks",
arXiv 2503.23186, 2025: CIFAR-100 on 8 V100 of 32 GB with NVLink, 100 epochs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.planner.strategies import EPOCHS, IMAGES
from hvdtrain.study.paper_b.plans import ADAPTIVE, DP, HYBRID, MP, SINGLE, TABLE_I, Optimum
from hvdtrain.study.results import Result
from hvdtrain.study.statistics import Estimate, equivalence, is_shown, median, number, ratio

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

    def is_equivalent(self, strategy: str) -> bool:
        """Return whether the accuracy is shown to be within POINTS of that of one rank."""
        values, single = self.accuracies(strategy), self.accuracies(SINGLE)
        return is_shown(equivalence(values, single, POINTS / 100))


def verdicts(measured: Measured) -> list[str]:
    """Return a line per claim: what was measured, and whether it holds here.

    A claim whose runs were left out has none.
    """
    static = [name for name in measured.timed if name != ADAPTIVE]
    best = min(static, key=lambda name: median(measured.hours(name)).value)
    on_ranks = f"x on {measured.ranks} ranks"
    # A speed-up over one device has a size only for a number of devices.
    claimed = 3.2 if measured.ranks == GPUS else None
    claims: list[tuple[str, Estimate, str, float | None]] = [
        (
            "adaptive over single: the paper reports 3.8x and 3.2x on 8 GPUs; measured ",
            *(measured.speedup(ADAPTIVE, SINGLE), on_ranks, claimed),
        )
    ]
    if HYBRID in measured.timed:
        text = "adaptive over hybrid: the paper reports 1.18x and 1.15x on 8 GPUs; measured "
        claims.append((text, measured.speedup(ADAPTIVE, HYBRID), on_ranks, 1.15))
    text, over = "adaptive is the fastest strategy: ", f"x over the best static one, {best}"
    claims.append((text, measured.speedup(ADAPTIVE, best), over, 1.0))
    if MP in measured.timed:
        text = "MP needs less memory per device than DP: DP needed "
        needed = ratio(measured.memory_bytes(DP), measured.memory_bytes(MP))
        claims.append((text, needed, " times the memory of MP", 1.0))
    lines = [
        f"- {before}{number(value, '.2f')}{after}: {_verdict(value, least)}"
        for before, value, after, least in claims
    ]
    if measured.accuracy:
        others = [name for name in measured.accuracy if name != SINGLE]
        unknown = [name for name in others if not measured.is_equivalent(name)]
        shown = f"not shown for {', '.join(unknown)}" if unknown else "shown"
        lines.append(f"- all accuracies are within 0.5 points of single: {shown}")
    return lines


def _verdict(value: Estimate, least: float | None) -> str:
    """Return what a measured ratio says of the claim that it is at least `least`.

    Args:
        least: None if only the claim that it is above 1 can be compared.
    """
    if value.low is None or value.high is None:
        return "one run of each cannot tell"
    if value.low <= 1 <= value.high:
        return "within the noise"
    if value.high < 1:
        return "the claim does not hold here"
    if least is None:
        return f"faster, and how much is claimed for {GPUS} GPUs only"
    return "faster, by less than claimed" if value.high < least else "the claim holds here"
