"""Deviation of steps under a plan from serial steps, and its tolerances."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.config import TrainConfig

# DESIGN's bounds. Kernels get the same rows on both sides, so that bf16 values are rounded alike.
# Replicas with synchronised batch norm get other rows, and their sums are split differently.
TOLERANCES = {"fp64": 1e-12, "fp32": 1e-4, "bf16": 1e-3}
SYNCHRONISED_BF16 = 0.1
LOOSER = {("fp64", "resnet50"): 1e-11}
UPDATES = {"fp64": 1e-12, "fp32": 1e-4, "bf16": 1e-4}  # weights are fp32 under bf16


@dataclass(frozen=True)
class Parity:
    """Largest relative errors of steps under a plan against serial steps, by the design's measure.

    Attributes:
        parameters: error of each parameter's gradient.
        updates: error of the change of each parameter, computed from the ranks' gradients.
        buffers: error of each running statistic and other buffer.
        loss: error of the loss.
        tolerance: bound on all errors but those of updates, at this precision.
        update_tolerance: bound on the errors of updates.
        steps: number of compared steps.
    """

    parameters: dict[str, float]
    updates: dict[str, float]
    buffers: dict[str, float]
    loss: float
    tolerance: float
    update_tolerance: float
    steps: int

    @property
    def statistics(self) -> float:
        """The largest error of a running statistic, or another buffer."""
        return max(self.buffers.values(), default=0.0)

    @property
    def update(self) -> float:
        """The largest error of an update."""
        return max(self.updates.values(), default=0.0)

    @property
    def largest(self) -> float:
        """The largest error anywhere."""
        return max(self.statistics, self.loss, self.update, *self.parameters.values())

    @property
    def is_within(self) -> bool:
        """Return whether the plan computes the serial steps within the tolerances."""
        return not self.fault

    @property
    def fault(self) -> str:
        """Return the error that exceeds its tolerance most, in words; empty if none does."""
        candidates = [
            *_errors("the gradient of ", self.parameters, self.tolerance),
            *_errors("the update of ", self.updates, self.update_tolerance),
            *_errors("the buffer ", self.buffers, self.tolerance),
            ("the loss", self.loss, self.tolerance),
        ]
        name, error, tolerance = max(candidates, key=lambda entry: entry[1] / entry[2])
        if error <= tolerance:
            return ""
        return f"{name} differs by {error:.2g}, more than {tolerance:g}"

    def by_component(self, components: Sequence[str]) -> dict[str, float]:
        """Return the largest gradient error of each component that has parameters."""
        largest: dict[str, float] = defaultdict(float)
        for name, error in self.parameters.items():
            owner = next(part for part in components if name.startswith(f"{part}."))
            largest[owner] = max(largest[owner], error)
        return dict(largest)


def _errors(
    words: str, errors: Mapping[str, float], tolerance: float
) -> list[tuple[str, float, float]]:
    return [(f"{words}{name}", error, tolerance) for name, error in errors.items()]


def tolerances(config: TrainConfig) -> tuple[float, float]:
    """Return the tolerance of gradients, buffers and the loss, and the tolerance of updates."""
    precision = config.precision
    if precision == "bf16" and config.batch_norm == "sync":
        return SYNCHRONISED_BF16, UPDATES[precision]
    return LOOSER.get((precision, config.model), TOLERANCES[precision]), UPDATES[precision]
