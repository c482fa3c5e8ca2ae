"""A worker of a parameter server: it computes gradients, and gets its weights from the servers.

Its optimizer is on the servers. In each step it pushes the gradients of each slice to the slice's
server, and waits for the answer: the weights that it continues with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from hvdtrain.plan.cut import Share
from hvdtrain.plan.marks import Reduction
from hvdtrain.sync.apart import Meetings, weighted_average
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.gradients import Gradients, SerialGradients
from hvdtrain.sync.messages import (
    ANSWER,
    GRADIENT,
    PUSH,
    WEIGHTS,
    Answer,
    Kind,
    Push,
    Request,
    Wire,
)
from hvdtrain.sync.slices import Slice
from hvdtrain.sync.states import CopiedStates, Replica, States


class PushedGradients(SerialGradients):
    """The gradients of a worker: its part of the mean over the batch.

    Args:
        parameters: of the model by name.
        shared: statistics of batch norm that the workers average in each step, without gradients;
            None if they average them at meetings only.

    Attributes:
        share: of the step, once its gradients are complete.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], shared: Gradients | None = None
    ) -> None:
        super().__init__(parameters)
        self.shared = shared
        self.share = Share(0.0, False)

    @override
    def announce(self, share: Share) -> None:
        """Announce the last backward to what the workers share."""
        if self.shared is not None:
            self.shared.announce(share)

    @override
    def start(self, share: Share) -> None:
        """Note the share, and start to average statistics."""
        super().start(share)
        self.share = share
        if self.shared is not None:
            self.shared.start(share)

    @override
    def finish(self) -> Reduction | None:
        """Wait for the statistics."""
        return self.shared.finish() if self.shared is not None else None

    @override
    def counted(self) -> Mapping[str, float]:
        """Return the bytes of the statistics."""
        return self.shared.counted() if self.shared is not None else {}

    @override
    def updated(self) -> Mapping[str, nn.Parameter]:
        """Return nothing: the servers update the weights."""
        return {}


class PushOptimizer(torch.optim.Optimizer):
    """The optimizer of a worker, whose steps are made by the servers.

    Args:
        parameters: of the model.
        push: sends their gradients, with the learning rate.
    """

    # Torch's method has a guard against being compiled, which loads its compiler.
    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)

    def __init__(self, parameters: Sequence[nn.Parameter], push: Callable[[float], None]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.push = push

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.push(self.param_groups[0]["lr"])


class AveragedStatistics:
    """Batch norm statistics and other changing buffers, in which workers agree at meetings.

    Args:
        statistics: by name; means and variances are averaged, weighted by samples.
        states: the other buffers; they and counters become those of the first worker with samples.
        collectives: among the workers.
    """

    def __init__(
        self, statistics: Mapping[str, Tensor], states: States, collectives: Collectives
    ) -> None:
        replica = Replica({}, statistics, states, None)
        self.averaged, self.collectives = list(replica.averaged.values()), collectives
        self.copies = CopiedStates(replica.copied, collectives)

    @torch.no_grad()
    def agree(self, samples: int) -> None:
        """Average them. Collective among the workers.

        Args:
            samples: of this worker since the last call.
        """
        agreed = weighted_average(self.collectives, "meeting", self.averaged, samples)
        for value, average in zip(self.averaged, agreed.averages, strict=True):
            value.copy_(average)
        is_first = self.collectives.place == agreed.first
        self.copies.start(Share(float(is_first), is_first))
        self.copies.finish()


@dataclass
class _Missed:
    """Numbers of missed steps.

    Attributes:
        answers: whose weights were used in a step.
    """

    answers: int = 0
    total: int = 0
    largest: int = 0

    def add(self, steps: int) -> None:
        """Count an answer that misses up to `steps` steps of another worker."""
        self.answers += 1
        self.total += steps
        self.largest = max(self.largest, steps)

    def counted(self) -> dict[str, float]:
        """Return mean and maximum."""
        mean = self.total / max(1, self.answers)
        return {"mean_staleness": mean, "max_staleness": self.largest}


class Worker(Meetings):
    """The meetings of a worker: it gets weights in every step.

    Args:
        gradients: its own.
        slices: of the model, by server.
        servers: their ranks.
        wire: its messages.
        workers: their number; this rank is one of them.
        staleness: how many steps of others its weights may miss; None: any number.
        statistics: in which workers agree at meetings; None if they do so in each step.

    Attributes:
        step: number of pushes so far.
        differ: whether this worker may hold other weights than the servers now.
        missed: of each step so far, how many steps of another worker its weights missed at most.
    """

    def __init__(
        self,
        gradients: PushedGradients,
        slices: Sequence[Slice],
        servers: Sequence[int],
        wire: Wire,
        workers: int,
        staleness: int | None,
        statistics: AveragedStatistics | None = None,
    ) -> None:
        self.gradients, self.slices, self.servers, self.wire = gradients, slices, servers, wire
        self.staleness, self.step, self.differ = staleness, 0, False
        self.statistics, self.samples = statistics, 0
        self.missed = _Missed()
        self.versions = [0] * len(slices)
        self._outgoing = [held.empty() for held in slices]
        self._weights = [held.empty() for held in slices]
        self._answers = [np.zeros(1 + workers, np.int64) for _ in slices]
        self._receipts: list[Request] = []

    def push(self, rate: float) -> None:
        """Send the gradients of a step."""
        share = self.gradients.share
        self._push(Kind.GRADIENTS if share.samples else Kind.EMPTY, rate)

    def after_step(self, step: int) -> None:
        """Get the weights after the step; tell the servers if there was no good gradient."""
        if not self._receipts:
            self._push(Kind.BAD)
        self.differ = self.staleness != 0
        self.samples += self.gradients.share.samples
        for answer in self._pull():
            self.missed.add(max(0, self.step - int(answer.steps.min())))

    def meet(self) -> None:
        """Get the weights with all updates of all workers, and agree on statistics."""
        if not self.differ:
            return
        self._push(Kind.MEETING)
        self._pull()
        if self.statistics is not None:
            self.statistics.agree(self.samples)
        self.samples, self.differ = 0, False

    def averages(self) -> dict[str, Tensor]:
        """Meet for a checkpoint, which holds the servers' weights; return nothing else."""
        self.meet()
        return {}

    def counted(self) -> Mapping[str, float]:
        """Return the bytes sent, and the steps of others that the weights of a step missed."""
        sent = self.wire.sent_bytes
        if self.statistics is not None:
            sent += self.statistics.collectives.sent_bytes
        return {"sent_bytes": sent, **self.missed.counted()}

    def _push(self, kind: Kind, rate: float = 0.0) -> None:
        """Send a push to each server, and start to receive the answers."""
        self.wire.flush()  # the servers have received the push before: they have answered it
        self.step += kind is not Kind.MEETING
        weight = self.gradients.share.weight
        for place, server in enumerate(self.servers):
            flat, answer = self._outgoing[place], self._answers[place]
            push = Push(kind, self.step, rate, weight, self.versions[place])
            self.wire.send(push.to_array(), PUSH, server)
            if kind is Kind.GRADIENTS:
                self.slices[place].copy_gradients(flat, self._scale(weight))
                self.wire.send_tensor(flat, GRADIENT, server)
            self._receipts += [
                self.wire.receive(answer, ANSWER, server),
                self.wire.receive_tensor(self._weights[place], WEIGHTS, server),
            ]

    def _scale(self, weight: float) -> float:
        """Return what makes gradients this worker's part of a sum, or a mean over its samples."""
        return 1.0 if self.staleness == 0 else 1 / weight

    def _pull(self) -> list[Answer]:
        """Wait for the answers, and continue with their weights."""
        self.wire.wait(self._receipts)
        self._receipts = []
        for held, flat in zip(self.slices, self._weights, strict=True):
            held.put_weights(flat)
        answers = [Answer.of(values) for values in self._answers]
        self.versions = [answer.version for answer in answers]
        return answers
