"""Progress of a run: what a checkpoint has besides tensors, and the learning rate by position."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

from hvdtrain.config import TrainConfig
from hvdtrain.engine.session import Device, Spent
from hvdtrain.errors import DataError, UsageError
from hvdtrain.models import call_users, find_function

LARGEST = 10**18  # bound on all counts
# Small gradients are 0 in fp16, so the loss is scaled up (Micikevicius et al., arXiv 1710.03740,
# section 3.2): half the scale once a gradient overflows, twice after GROWTH_STEPS without one.
LOSS_SCALE, LARGEST_SCALE, GROWTH_STEPS = 2.0**16, 2.0**24, 2000


@dataclass
class Progress:
    """Progress of training; a checkpoint has all of it.

    Attributes:
        index_hash: hash of the data set's index.
        step: steps done.
        position: samples consumed, over all epochs and ranks.
        epoch_loss_sum, epoch_samples: sums over the current epoch.
        skipped_steps: bad steps that changed nothing.
        loss_scale: factor of the loss in fp16, a power of two; otherwise 1.
        scaled_steps: steps since `loss_scale` changed.
        seconds: seconds since the first step, summed over all starts of the run.
        train_seconds: seconds of steps.
        evaluation_seconds: seconds of evaluations.
        exposed_seconds, communication_seconds: seconds of this rank's reductions and transfers,
            exposed and in total.
        compute_seconds: seconds of this rank's forward and backward passes.
        bubble_seconds: seconds that this rank waited for the work of other stages.
        best: metric, value and step of the best epoch so far.
        final: losses and accuracies of the last evaluation.
    """

    index_hash: str
    step: int = 0
    position: int = 0
    epoch_loss_sum: float = 0.0
    epoch_samples: int = 0
    skipped_steps: int = 0
    loss_scale: float = 1.0
    scaled_steps: int = 0
    seconds: float = 0.0
    train_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    exposed_seconds: float = 0.0
    communication_seconds: float = 0.0
    bubble_seconds: float = 0.0
    compute_seconds: float = 0.0
    best: dict[str, Any] | None = None
    final: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> "Progress":
        """Return the progress in a checkpoint.

        Raises:
            DataError: if a value is invalid; the message continues the name of the checkpoint.
        """
        # Not in checkpoints of earlier versions.
        newer = ("skipped_steps", "loss_scale", "scaled_steps", "evaluation_seconds")
        kept = {name: getattr(cls, name) for name in newer} | dict(kept)
        kinds: dict[str, Any] = {item.name: item.type for item in fields(cls)}
        kinds |= {"metrics_bytes": int}
        if "ledger" in kept:
            kinds |= {"ledger": str, "ledger_bytes": int}
        for name, kind in kinds.items():
            if not _fits(kept.get(name, ...), kind):
                raise DataError(
                    f"holds a progress with an invalid {name}: {str(kept.get(name))[:60]!r}"
                )
        return cls(**{item.name: kept[item.name] for item in fields(cls)})

    def scale_loss(self, overflowed: bool) -> None:
        """Change the scale of the loss after a step in fp16, by the rule of `LOSS_SCALE`."""
        self.scaled_steps += 1
        if overflowed:
            self.loss_scale, self.scaled_steps = max(1.0, self.loss_scale / 2), 0
        elif self.scaled_steps == GROWTH_STEPS:
            self.loss_scale, self.scaled_steps = min(LARGEST_SCALE, self.loss_scale * 2), 0

    def count(self, spent: Spent, device: Device) -> None:
        """Add the seconds of a step on the device's clock."""
        self.exposed_seconds += device.seconds(spent.exposed)
        self.communication_seconds += device.seconds(spent.communication)
        self.bubble_seconds += device.seconds(spent.bubble)
        self.compute_seconds += device.seconds(spent.compute)


class Stopwatch:
    """Counts the seconds that pass on a device's clock into one field of a run's progress."""

    def __init__(self, progress: Progress, name: str, device: Device) -> None:
        self.progress, self.name, self.device = progress, name, device
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self.since = time.perf_counter()

    def count(self) -> None:
        """Add the seconds since the last count."""
        now = time.perf_counter()
        passed = self.device.seconds(now - self.since)
        setattr(self.progress, self.name, getattr(self.progress, self.name) + passed)
        self.since = now


def learning_rate(config: TrainConfig, epoch_length: int, position: int) -> float:
    """Return the learning rate of the step that starts at `position` (samples consumed so far).

    Linear warm-up (Goyal et al., arXiv 1706.02677). Then it is constant, follows a cosine
    (Loshchilov and Hutter, arXiv 1608.03983) or a line down to 0, or is divided by ten at
    50 % and at 75 % of training. A user's function returns a factor for the share that is done.
    """
    peak = config.learning_rate()
    warmup = config.warmup_epochs * epoch_length
    if position < warmup:
        return peak * min(1.0, (position + config.batch_size) / warmup)
    total = config.total_samples(epoch_length)
    done = min(1.0, (position - warmup) / max(1.0, total - warmup))
    if config.lr_schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    if config.lr_schedule == "linear":
        return peak * (1 - done)
    if config.lr_schedule == "step":
        progress = position / total
        return peak * (0.01 if progress >= 0.75 else 0.1 if progress >= 0.5 else 1.0)
    if config.lr_schedule != "constant":
        return peak * rate_factor(config.lr_schedule, position / total)
    return peak


def rate_factor(schedule: str, done: float) -> float:
    """Return the factor of the learning rate that a user's function returns.

    Args:
        done: share of the run before this step, 0 to below 1.

    Raises:
        UsageError: if it fails, or returns something else than 0 or a positive number.
    """
    where = f"--lr-schedule {schedule}"
    factor = call_users(where, find_function(schedule, "lr_schedule"), done)
    if not isinstance(factor, Real) or not 0 <= float(factor) < math.inf:
        raise UsageError(
            f"{where} returned {factor} for {done:g}, the share of the run that is done: return a "
            "factor of --lr, 0 or more"
        )
    return float(factor)


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value from JSON can be a field of this type; counts are never negative."""
    if kind is int:
        return type(value) is int and 0 <= value < LARGEST
    if kind is float:
        return _fits(abs(value), int) if type(value) is int else _is_finite(value)
    if kind is str:
        return isinstance(value, str)
    if kind == dict[str, Any]:
        return isinstance(value, dict)
    return value is None or (  # the best epoch
        isinstance(value, dict)
        and _fits(value.get("metric"), str)
        and _fits(value.get("value"), float)
        and _fits(value.get("step"), int)
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
