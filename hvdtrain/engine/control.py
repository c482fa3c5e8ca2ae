"""Control vector of a step: one small non-blocking all-reduce per step, read later.

It is sent `delay` steps after its step, and read `ahead` steps after that: always the same
numbers, so that all ranks take a decision at the same step. Inside an epoch the ranks agree on
nothing else, but for comparisons of replicas and norms of gradients. The vector has the requests
to stop or to save, bad steps, the loss that is logged and the vitals of each rank.
"""

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.engine.session import PendingStep, StepOutcome
from hvdtrain.errors import Interrupted, Preempted
from hvdtrain.host.process import wait_until
from hvdtrain.world import World

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
