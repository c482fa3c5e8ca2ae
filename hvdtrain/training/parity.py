"""How far steps under a plan are from serial steps, and how far they may be."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.config import TrainConfig

# DESIGN's bounds. Kernels are given the same rows on both sides, so that brain floats are rounded
# alike; where replicas normalise together they are not, and their sums are cut elsewhere.
TOLERANCES = {"fp64": 1e-12, "fp32": 1e-4, "bf16": 1e-3}
SYNCHRONISED_BF16 = 0.1
LOOSER = {("fp64", "resnet50"): 1e-11}
UPDATES = {"fp64": 1e-12, "fp32": 1e-4, "bf16": 1e-4}  # weights are fp32 under bf16


@dataclass(frozen=True)
class Parity:
    """How far steps under a plan are from serial steps, by the design's measure.

    Attributes:
        parameters: the largest relative error of each parameter's gradient in any step.
        updates: of what a step changed each parameter by, given the gradients.
        buffers: of each running statistic, and any other buffer.
        loss: of the loss.
        tolerance: what is allowed at this precision. update_tolerance: of updates.
        steps: that were compared.
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
        """Whether the plan computes the serial steps."""
        return not self.fault

    @property
    def fault(self) -> str:
        """What is furthest beyond its tolerance, in words; empty if nothing is."""
        found = [
            *_errors("the gradient of ", self.parameters, self.tolerance),
            *_errors("the update of ", self.updates, self.update_tolerance),
            *_errors("the buffer ", self.buffers, self.tolerance),
            ("the loss", self.loss, self.tolerance),
        ]
        name, error, tolerance = max(found, key=lambda each: each[1] / each[2])
        if error <= tolerance:
            return ""
        return f"{name} differs by {error:.2g}, more than {tolerance:g}"

    def by_component(self, components: Sequence[str]) -> dict[str, float]:
        """The largest error of a gradient in each component; those without are left out."""
        found: dict[str, float] = defaultdict(float)
        for name, error in self.parameters.items():
            owner = next(part for part in components if name.startswith(f"{part}."))
            found[owner] = max(found[owner], error)
        return dict(found)


def _errors(
    words: str, errors: Mapping[str, float], tolerance: float
) -> list[tuple[str, float, float]]:
    return [(f"{words}{name}", error, tolerance) for name, error in errors.items()]


def tolerances(config: TrainConfig) -> tuple[float, float]:
    """What is allowed of gradients, buffers and the loss; and of updates."""
    precision = config.precision
    if precision == "bf16" and config.batch_norm == "sync":
        return SYNCHRONISED_BF16, UPDATES[precision]
    return LOOSER.get((precision, config.model), TOLERANCES[precision]), UPDATES[precision]
