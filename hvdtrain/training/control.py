"""How ranks agree while training: one small non-blocking all-reduce a step, read one step later.

No other agreement between ranks exists inside an epoch: the wish to stop or to save, a loss that
is not finite and the loss that is logged all ride on it.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hvdtrain.errors import Interrupted, Preempted
from hvdtrain.poll import wait_until
from hvdtrain.world import World

INTERRUPT, PREEMPT, SAVE, WRITTEN, LOSS, SAMPLES, SECONDS = range(7)


class Wishes(NamedTuple):
    """What a rank tells the others beside the results of its step."""

    interrupted: bool
    preempted: bool
    save: bool = False  # a checkpoint is due
    written: bool = False  # its part of the pending checkpoint is on the disk


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of one step.

    Attributes:
        stop: the exit code to leave with, or None to go on.
        save: whether a rank asks for a checkpoint.
        written: how many ranks have written their part of the pending checkpoint.
        loss: mean loss over the samples of the step.
        samples: samples of the step, over all ranks.
        slowest: the rank whose step took longest, and its seconds.
        posted_at: when this rank was done with the step, by time.perf_counter.
    """

    stop: int | None
    save: bool
    written: int
    loss_sum: float
    samples: int
    slowest: tuple[int, float]
    posted_at: float

    @property
    def loss(self) -> float:
        """Mean loss over the samples of the step."""
        return self.loss_sum / max(1, self.samples)

    @property
    def finite(self) -> bool:
        """Whether the loss is a number."""
        return math.isfinite(self.loss_sum)


class Control:
    """Sends each step's vector and hands out the agreement of the step before.

    On a GPU the loss is not waited for: it is copied beside the computation, and its step's
    vector leaves one step later.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self.world = world
        self.delay = 1 if device.type == "cuda" else 0
        self.waiting: deque[tuple[Callable[[], float], np.ndarray, float]] = deque()
        self.in_flight: tuple[np.ndarray, Any, float] | None = None
        self.last: Agreed | None = None  # of a rank that is alone

    def post(
        self, loss_sum: Tensor | None, samples: int, seconds: float, wishes: Wishes
    ) -> Agreed | None:
        """Send this rank's part of a step; return the newest agreement that is not yet read."""
        if self.world.communicator is None and self.delay == 0:
            return self._alone(loss_sum, samples, seconds, wishes)
        vector = np.zeros(SECONDS + self.world.size)
        vector[INTERRUPT], vector[PREEMPT] = wishes.interrupted, wishes.preempted
        vector[SAVE], vector[WRITTEN], vector[SAMPLES] = wishes.save, wishes.written, samples
        vector[SECONDS + self.world.rank] = seconds
        self.waiting.append((_read_later(loss_sum), vector, time.perf_counter()))
        agreed = self._receive()
        if len(self.waiting) > self.delay:
            self._send()
        return agreed

    def _alone(
        self, loss_sum: Tensor | None, samples: int, seconds: float, wishes: Wishes
    ) -> Agreed | None:
        """The same of one rank on a CPU, which has nobody to agree with: one step late, too."""
        before, self.last = (
            self.last,
            Agreed(
                _exit_code(wishes.interrupted, wishes.preempted),
                wishes.save,
                int(wishes.written),
                0.0 if loss_sum is None else float(loss_sum),
                samples,
                (0, seconds),
                time.perf_counter(),
            ),
        )
        return before

    def drain(self) -> list[Agreed]:
        """The agreements of all steps still under way, oldest first."""
        agreements = [self.last, self._receive()]
        self.last = None
        while self.waiting:
            self._send()
            agreements.append(self._receive())
        return [agreed for agreed in agreements if agreed is not None]

    def _send(self) -> None:
        read_loss, vector, posted_at = self.waiting.popleft()
        vector[LOSS] = read_loss()
        request = None
        if self.world.communicator is not None:
            total = np.empty_like(vector)
            request = self.world.communicator.Iallreduce(vector, total)
            # The vector must live as long as the send.
            self.in_flight = total, (request, vector), posted_at
        else:
            self.in_flight = vector, None, posted_at

    def _receive(self) -> Agreed | None:
        if self.in_flight is None:
            return None
        total, sent, posted_at = self.in_flight
        if sent is not None:
            wait_until(sent[0].Test)
        self.in_flight = None
        seconds = total[SECONDS:]
        slowest = int(seconds.argmax())
        return Agreed(
            _exit_code(bool(total[INTERRUPT]), bool(total[PREEMPT])),
            bool(total[SAVE]),
            round(total[WRITTEN]),
            float(total[LOSS]),
            round(total[SAMPLES]),
            (slowest, float(seconds[slowest])),
            posted_at,
        )


def _exit_code(interrupted: bool, preempted: bool) -> int | None:
    if interrupted:
        return Interrupted.exit_code
    return Preempted.exit_code if preempted else None


def _read_later(value: Tensor | None) -> Callable[[], float]:
    if value is None:
        return lambda: 0.0
    if value.device.type == "cpu":
        return lambda: float(value)
    host = torch.empty((), dtype=value.dtype, pin_memory=True)
    host.copy_(value, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> float:
        copied.synchronize()
        return float(host)

    return read
