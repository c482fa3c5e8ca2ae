"""The numbers of paper B, and where they disagree with its text or with each other.

Baligodugula and Amsaad, "Optimizing Distributed Training Approaches for Scaling Neural Networks",
arXiv 2503.23186, 2025: CIFAR-100 on 8 V100 of 32 GB with NVLink, 100 epochs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.planner.strategies import EPOCHS, IMAGES

STRATEGIES = ("single", "DP", "MP", "hybrid", "adaptive")
GPUS = 8
POINTS = 0.5  # within which the paper says that final accuracies lie, in points of per cent


@dataclass(frozen=True)
class Published:
    """The columns of table I for one model.

    Attributes:
        title: name of the model in the paper.
        hours: of training, by strategy.
        accuracy: final validation accuracy in per cent, by strategy.
        memory_gb: peak memory in 1e9 bytes, by strategy.
        communication: share of time spent in communication, 0 to 1, by strategy.
    """

    title: str
    hours: Mapping[str, float]
    accuracy: Mapping[str, float]
    memory_gb: Mapping[str, float]
    communication: Mapping[str, float]

    def images_per_second(self, strategy: str) -> float:
        """Return the throughput that the hours mean: 100 epochs of 50,000 images."""
        return EPOCHS * IMAGES / (3600 * self.hours[strategy])

    def speedup(self, strategy: str) -> float:
        """Return the speed-up over one GPU that the hours mean."""
        return self.hours["single"] / self.hours[strategy]


def _row(*values: float) -> Mapping[str, float]:
    return dict(zip(STRATEGIES, values, strict=True))


PUBLISHED: Mapping[str, Published] = {
    "resnet50": Published(
        title="ResNet-50",
        hours=_row(24.6, 8.2, 12.8, 7.6, 6.5),
        accuracy=_row(78.2, 77.9, 78.1, 78.0, 78.3),
        memory_gb=_row(12.8, 14.2, 5.6, 7.8, 8.2),
        communication=_row(0.0, 0.423, 0.186, 0.325, 0.271),
    ),
    "vit_b16": Published(
        title="ViT-B/16",
        hours=_row(38.4, 14.6, 18.2, 13.2, 11.9),
        accuracy=_row(81.5, 81.2, 81.4, 81.3, 81.6),
        memory_gb=_row(28.4, 30.1, 9.8, 12.4, 13.6),
        communication=_row(0.0, 0.387, 0.224, 0.298, 0.253),
    ),
}

# Speed-ups that the text states: over one GPU, and of adaptive over static hybrid.
STATED_SPEEDUP: Mapping[str, float] = {"resnet50": 3.8, "vit_b16": 3.2}
STATED_OVER_HYBRID: Mapping[str, float] = {"resnet50": 1.18, "vit_b16": 1.15}
STATED_HYBRID = 3.2  # over one GPU, for both models


def _contradictions() -> tuple[str, ...]:
    resnet, vit = PUBLISHED["resnet50"], PUBLISHED["vit_b16"]
    over = [one.hours["hybrid"] / one.hours["adaptive"] for one in (resnet, vit)]
    busy = [GPUS * one.hours["DP"] * (1 - one.communication["DP"]) for one in (resnet, vit)]
    return (
        f"The text says that adaptive is {STATED_OVER_HYBRID['resnet50']}x (ResNet-50) and "
        f"{STATED_OVER_HYBRID['vit_b16']}x (ViT-B/16) faster than static hybrid; by table I it is "
        f"{over[0]:.2f}x and {over[1]:.2f}x.",
        f"The text says that hybrid is {STATED_HYBRID}x faster than one GPU; by table I it is "
        f"{resnet.speedup('hybrid'):.2f}x for ResNet-50, but {vit.speedup('hybrid'):.2f}x for "
        "ViT-B/16.",
        "The text says that DP is near-linear up to 4 GPUs; by table I it is "
        f"{resnet.speedup('DP'):.2f}x (ResNet-50) and {vit.speedup('DP'):.2f}x (ViT-B/16) on "
        f"{GPUS} GPUs, less than a linear speed-up on 4.",
        'The text says that "parameter-heavy layers" get MP; figure 6 gives the MLPs, which hold '
        "most of the parameters of a ViT, DP.",
        "Table I's communication does not explain its hours: without it, DP's "
        f"{GPUS} GPUs compute {busy[0]:.1f} GPU-hours (ResNet-50) and {busy[1]:.1f} (ViT-B/16) "
        f"for the work that one GPU does in {resnet.hours['single']} and "
        f"{vit.hours['single']} hours.",
        "With identical hyperparameters 8 GPUs share the batch of one, and need less memory; by "
        f"table I DP needs more than one GPU: {resnet.memory_gb['DP']} against "
        f"{resnet.memory_gb['single']} GB (ResNet-50), {vit.memory_gb['DP']} against "
        f"{vit.memory_gb['single']} GB (ViT-B/16). So each GPU may have had a whole batch.",
    )


CONTRADICTIONS = _contradictions()

UNSTATED = (
    "The paper does not state the batch size, optimizer, learning rate, precision, image size, "
    "augmentation, number of repeats, or the shapes of MP and hybrid."
)
