"""Counts the bytes of components on a rank: what they hold, activations, temporary copies."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdtrain.models.costs import ComponentCost

GIB = 2**30
RESERVE = 0.15  # share of a memory limit for memory that is not counted


def optimizer_copies(optimizer: str) -> int:
    """Return how many copies of the parameters an optimizer keeps; of a user's own, two."""
    return 1 if optimizer == "sgd" else 2


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank holds; activations at their peak."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def held_memory(costs: "Iterable[ComponentCost]", optimizer: str, activations: int = 0) -> Memory:
    """Return the memory of components between steps, and of `activations` bytes."""
    costs = list(costs)
    weights = sum(cost.parameter_bytes for cost in costs)
    buffers = sum(cost.buffer_bytes for cost in costs)
    return Memory(weights + buffers, weights, optimizer_copies(optimizer) * weights, activations)


def lasting_bytes(costs: "Iterable[ComponentCost]", optimizer: str, replicas: int) -> int:
    """Return the bytes that the components of a stage need in every step, whatever its samples.

    Besides what they hold, there are temporary copies. A checkpoint is written from a copy while
    training continues; each replica writes its share. Horovod copies the gradients if there are
    replicas.
    """
    costs = list(costs)
    copies = (1 + optimizer_copies(optimizer)) / replicas + (replicas > 1)
    copied = sum(round(copies * cost.parameter_bytes) for cost in costs)
    return held_memory(costs, optimizer).total + copied


def activation_bytes(
    costs: "Iterable[ComponentCost]", rows: int, recomputed: Collection[str] = ()
) -> int:
    """Return the bytes that a forward of `rows` samples keeps for its backward.

    Components that are recomputed keep only their output.
    """
    if not rows:
        return 0
    return sum(
        rows * cost.output_bytes
        + (0 if cost.name in recomputed else rows * cost.saved_bytes + cost.fixed_bytes)
        for cost in costs
    )


# Tensors of one micro-batch at a boundary between stages, besides the input of each one in flight:
# the gradient that is used or sent, and what is received meanwhile.
BUFFERS = 2


def process_bytes(lasting: float, activations: float, resident: int, factor: float) -> int:
    """Return the bytes of a rank's process with some components.

    Args:
        lasting: result of `lasting_bytes`.
        activations: result of `activation_bytes` for all micro-batches in flight.
        resident, factor: bytes of the process besides, and real bytes of activations divided by
            the counted ones, as in `RankTimes`.
    """
    return round(resident + lasting + factor * activations)
