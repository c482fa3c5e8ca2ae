"""How ranks agree while training: one small non-blocking all-reduce a step, read one step later.

No other agreement between ranks exists inside an epoch: the wish to stop or to save, a bad step,
the loss that is logged and how each rank fares all ride on it.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import Interrupted, Preempted
from hvdtrain.poll import wait_until
from hvdtrain.world import World

INTERRUPT, PREEMPT, SAVE, CHANGE, WRITTEN, FAILED, BAD, LOSS, SAMPLES, HEADER = range(10)


class Wishes(NamedTuple):
    """What a rank tells the others beside the results of its step."""

    interrupted: bool
    preempted: bool
    save: bool = False  # a checkpoint is due
    written: bool = False  # its part of the pending checkpoint is on the disk
    failed: bool = False  # it could not write its part, or make the checkpoint
    bad: bool = False  # it left out an update
    change: bool = False  # the plan, or what is known of the ranks, is to be another


class Vitals(NamedTuple):
    """How a rank fares in a step.

    Attributes:
        seconds: the step, with the wait for its data.
        own_seconds: of these, all but waiting for other ranks.
        data_seconds: the wait for its data.
        memory_bytes: resident, or allocated on the GPU.
        load: of its host, processes that are ready to run.
        celsius: of the hottest sensor of its processor or GPU; not a number where there is none.
    """

    seconds: float
    own_seconds: float
    data_seconds: float = 0.0
    memory_bytes: float = 0.0
    load: float = 0.0
    celsius: float = math.nan


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of one step.

    Attributes:
        stop: the exit code to leave with, or None to go on.
        save: whether a rank asks for a checkpoint.
        change: whether rank 0 asks all to come together over the plan.
        written: how many ranks have written their part of the pending checkpoint.
        failed: how many could not.
        bad: how many ranks left out an update.
        loss: mean loss over the samples of the step.
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
        """Whether the loss is a number."""
        return math.isfinite(self.loss_sum)

    @classmethod
    def of(cls, total: NDArray[np.float64], posted_at: float) -> "Agreed":
        """What the sum of all ranks' vectors says."""
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
    """The exit code to leave with, where any rank was interrupted or preempted; else None."""
    if interrupted:
        return Interrupted.exit_code
    return Preempted.exit_code if preempted else None


class Control:
    """Sends each step's vector and hands out the agreement of the step before.

    Args:
        delay: steps after which a step's vector leaves: 1 on a GPU, whose loss is not waited for
            but copied beside the computation.
    """

    def __init__(self, world: World, delay: int) -> None:
        self.world, self.delay = world, delay
        self.waiting: deque[tuple[Callable[[], float], np.ndarray, float]] = deque()
        self.in_flight: tuple[np.ndarray, Any, float] | None = None

    def post(
        self, read_loss: Callable[[], float], samples: int, wishes: Wishes, vitals: Vitals
    ) -> Agreed | None:
        """Send this rank's part of a step; return the newest agreement that is not yet read.

        Args:
            read_loss: gives the sum of the losses of `samples`; called when the vector leaves.
        """
        fields = len(Vitals._fields)
        vector = np.zeros(HEADER + self.world.size * fields)
        vector[INTERRUPT], vector[PREEMPT], vector[SAVE] = wishes[:3]
        vector[WRITTEN], vector[BAD], vector[SAMPLES] = wishes.written, wishes.bad, samples
        vector[CHANGE], vector[FAILED] = wishes.change, wishes.failed
        own = HEADER + self.world.rank * fields
        vector[own : own + fields] = vitals
        self.waiting.append((read_loss, vector, time.perf_counter()))
        agreed = self._receive()
        if len(self.waiting) > self.delay:
            self._send()
        return agreed

    def drain(self) -> list[Agreed]:
        """The agreements of all steps still under way, oldest first."""
        agreements = [self._receive()]
        while self.waiting:
            self._send()
            agreements.append(self._receive())
        return [agreed for agreed in agreements if agreed is not None]

    def _send(self) -> None:
        read_loss, vector, posted_at = self.waiting.popleft()
        vector[LOSS] = read_loss()
        request = None
        total = vector
        if self.world.communicator is not None:
            total = np.empty_like(vector)
            request = self.world.communicator.Iallreduce(vector, total)
        # The vector must live as long as the send.
        self.in_flight = total, (request, vector), posted_at

    def _receive(self) -> Agreed | None:
        if self.in_flight is None:
            return None
        total, (request, _), posted_at = self.in_flight
        if request is not None:
            wait_until(request.Test)
        self.in_flight = None
        return Agreed.of(total, posted_at)
