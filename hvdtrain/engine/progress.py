"""Progress of a run: checkpoints have it, learning rates follow it, and ranks agree on it.

Ranks agree by a control vector: one small non-blocking all-reduce per step, read later. It is sent
`delay` steps after its step, and read `ahead` steps after that: always the same numbers, so that
all ranks take a decision at the same step. Inside an epoch the ranks agree on nothing else, but
for comparisons of replicas and norms of gradients. The vector has the requests to stop or to save,
bad steps, the loss that is logged and the vitals of each rank.
"""

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.config import TrainConfig
from hvdtrain.engine.session import Device, PendingStep, Spent, StepOutcome
from hvdtrain.errors import DataError, Interrupted, Preempted, UsageError
from hvdtrain.host.process import wait_until
from hvdtrain.models.find import call_users, find_function
from hvdtrain.world import World

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
        if type(value) is int:
            return _fits(abs(value), int)
        return isinstance(value, float) and math.isfinite(value)
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


INTERRUPT, PREEMPT, SAVE, CHANGE, WRITTEN, FAILED, BAD, LOSS, SAMPLES, HEADER = range(10)


class Flags(NamedTuple):
    """Flags of one rank in the control vector."""

    interrupted: bool
    preempted: bool
    save: bool = False  # a checkpoint is due
    written: bool = False  # the rank's files of the pending checkpoint are on the disk
    failed: bool = False  # the rank could not write its files, or complete the checkpoint
    change: bool = False  # rank 0 requests a migration to another plan


class Vitals(NamedTuple):
    """Measurements of one rank in one step.

    Attributes:
        seconds: duration of the step, with the wait for its data.
        own_seconds: `seconds` without the wait for other ranks, which is known once it is sent.
        data_seconds: the wait for its data.
        memory_bytes: resident set, or memory allocated on the GPU; with a memory limit, its peak
            if a step has reached that.
        load: processes of the host that are ready to run.
    """

    seconds: float
    own_seconds: float
    data_seconds: float = 0.0
    memory_bytes: float = 0.0
    load: float = 0.0


OWN_SECONDS, DATA_SECONDS = map(Vitals._fields.index, ("own_seconds", "data_seconds"))
SECONDS = 3  # the first fields of `Vitals` are seconds


@dataclass(frozen=True)
class Agreed:
    """The agreement of all ranks on one step.

    Attributes:
        stop: the exit code to leave with, or None to continue.
        save: whether a rank requests a checkpoint.
        change: whether rank 0 requests a migration to another plan.
        written: number of ranks that have written their files of the pending checkpoint.
        failed: number of ranks that could not write them.
        bad: number of ranks that skipped an update.
        loss_sum: sum of the losses of the step's samples, over all ranks.
        samples: samples of the step, over all ranks.
        vitals: [ranks, Vitals], fp64.
        posted_at: when this rank was done with the step, by time.perf_counter.
    """

    stop: int | None
    save: bool
    change: bool
    written: int
    failed: int
    bad: int
    loss_sum: float
    samples: int
    vitals: NDArray[np.float64]
    posted_at: float

    @property
    def loss(self) -> float:
        """Mean loss over the samples of the step."""
        return self.loss_sum / max(1, self.samples)

    @property
    def finite(self) -> bool:
        """Return whether the loss is finite."""
        return math.isfinite(self.loss_sum)

    @classmethod
    def of(cls, total: NDArray[np.float64], posted_at: float) -> "Agreed":
        """Return the agreement in the sum of all ranks' control vectors."""
        return cls(
            stop_code(bool(total[INTERRUPT]), bool(total[PREEMPT])),
            bool(total[SAVE]),
            bool(total[CHANGE]),
            round(total[WRITTEN]),
            round(total[FAILED]),
            round(total[BAD]),
            float(total[LOSS]),
            round(total[SAMPLES]),
            total[HEADER:].reshape(-1, len(Vitals._fields)),
            posted_at,
        )


def stop_code(interrupted: bool, preempted: bool) -> int | None:
    """Return the exit code if any rank was interrupted or preempted; else None."""
    if interrupted:
        return Interrupted.exit_code
    return Preempted.exit_code if preempted else None


class Stopped(Exception):
    """The ranks agreed to stop, with the exit code `code`, in an epoch or its evaluation."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Control:
    """Sends each step's control vector and returns the agreement on an earlier step.

    Args:
        delay: steps after which a step's vector is sent: 1 on a GPU, whose loss is copied during
            the computation of the next step.
        ahead: agreements in flight: how many steps a rank may be ahead of the slowest one.
    """

    def __init__(self, world: World, delay: int, ahead: int = 1) -> None:
        self.world, self.delay, self.ahead = world, delay, ahead
        self.waiting: deque[tuple[PendingStep, np.ndarray, float]] = deque()
        self.in_flight: deque[tuple[np.ndarray, Any, float]] = deque()

    def post(
        self, step: PendingStep, flags: Flags, vitals: Vitals
    ) -> tuple[Agreed | None, list[StepOutcome]]:
        """Send this rank's vector of a step as soon as its device is done with it.

        Args:
            vitals: `own_seconds` with the wait for other ranks, which the outcome tells.

        Returns:
            The oldest agreement, if enough are in flight; the outcomes that were sent.
        """
        fields = len(Vitals._fields)
        vector = np.zeros(HEADER + self.world.size * fields)
        vector[INTERRUPT], vector[PREEMPT], vector[SAVE] = flags[:3]
        vector[WRITTEN], vector[SAMPLES] = flags.written, step.samples
        vector[CHANGE], vector[FAILED] = flags.change, flags.failed
        start = HEADER + self.world.rank * fields
        vector[start : start + fields] = vitals
        self.waiting.append((step, vector, time.perf_counter()))
        agreed = self._receive() if len(self.in_flight) >= self.ahead else None
        return agreed, [self._send()] if len(self.waiting) > self.delay else []

    def drain(self) -> tuple[list[Agreed], list[StepOutcome]]:
        """Return the agreements on all steps still under way, oldest first, and their outcomes."""
        agreements, outcomes = [], []
        while self.waiting or self.in_flight:
            if not self.in_flight:
                outcomes.append(self._send())
            agreements.append(self._receive())
        return agreements, outcomes

    def _send(self) -> StepOutcome:
        step, vector, posted_at = self.waiting.popleft()
        outcome = step.outcome()
        vector[LOSS], vector[BAD], spent = outcome
        start = HEADER + self.world.rank * len(Vitals._fields)
        if spent.work is None:
            vector[start + OWN_SECONDS] -= spent.waited
        else:  # the host's time is that of other steps
            vector[start + OWN_SECONDS] = spent.work + vector[start + DATA_SECONDS]
        request = None
        total = vector
        if self.world.communicator is not None:
            total = np.empty_like(vector)
            request = self.world.communicator.Iallreduce(vector, total)
        # The vector must live as long as the send.
        self.in_flight.append((total, (request, vector), posted_at))
        return outcome

    def _receive(self) -> Agreed:
        total, (request, _), posted_at = self.in_flight.popleft()
        if request is not None:
            wait_until(request.Test)
        return Agreed.of(total, posted_at)
