"""Settings of table I that the paper does not state, and the predictions that they lead to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hvdtrain import models
from hvdtrain.models.costs import component_costs
from hvdtrain.planner.clusters import Cluster, question_of
from hvdtrain.planner.cost import Question

if TYPE_CHECKING:
    from hvdtrain.models.costs import ComponentCost

CLUSTER = "8-v100"
CLASSES = 100  # CIFAR-100
IMAGE_SIZE = 224  # the paper's images/s would be far too few for a V100 at 32 pixels


@dataclass(frozen=True)
class Setting:
    """Settings of a model that the paper does not state.

    The batch is the power of two with which the memory that we predict for one GPU is closest to
    that of table I. Optimizers are the usual ones of these models. Weights and activations are
    fp32, the default of PyTorch: the paper names no other precision.
    """

    batch_size: int
    optimizer: Literal["sgd", "adamw"]


SETTINGS: Mapping[str, Setting] = {
    "resnet50": Setting(128, "sgd"),
    "vit_b16": Setting(256, "adamw"),
}


def question_for(model: str, cluster: Cluster) -> Question:
    """Return the question of table I for a model, on a cluster."""
    setting = SETTINGS[model]
    return question_of(cluster, costs_of(model, IMAGE_SIZE), setting.batch_size, setting.optimizer)


def costs_of(model: str, image_size: int) -> "list[ComponentCost]":
    """Return the costs of the components of a model of table I."""
    components = models.components(model, CLASSES, image_size)
    return list(component_costs(components, image_size, classes=CLASSES))
