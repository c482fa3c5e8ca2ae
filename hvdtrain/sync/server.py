"""A parameter server: a rank that holds a slice of the weights, and updates it for the workers.

Workers push gradients and get the weights back. Servers run the same training loop as workers: a
step of a server is over once every worker has pushed its gradients of that step, so that all ranks
take decisions at the same step. A server serves in its main thread: whatever it does between two
steps waits for no worker that waits for the server.

What is lost with a server or a worker: everything since the last checkpoint, as with any rank. All
ranks end, because no other rank holds the slice. There is no copy of it between checkpoints.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from hvdtrain.host.process import wait_until
from hvdtrain.plan.cut import Share
from hvdtrain.sync.apart import Meetings
from hvdtrain.sync.gradients import SerialGradients
from hvdtrain.sync.messages import ANSWER, GRADIENT, WEIGHTS, Answer, Kind, Push, Wire
from hvdtrain.sync.slices import Slice


class ServedGradients(SerialGradients):
    """The gradients of a server, which come from workers: it computes none itself."""

    @override
    def start(self, share: Share) -> None:
        """Do nothing: there was no backward."""

    @override
    def zero(self) -> None:
        """Do nothing: an update sets them."""


class Updates(ABC):
    """The way in which a server turns pushes into updates of its weights.

    Args:
        held: the server's parameters.
        optimizer: of these parameters.

    Attributes:
        version: number of updates so far.
    """

    def __init__(self, held: Slice, optimizer: torch.optim.Optimizer) -> None:
        self.held, self.optimizer, self.version = held, optimizer, 0
        for value in held.parameters:
            value.grad = torch.zeros_like(value)

    @abstractmethod
    def take(self, worker: int, push: Push, gradients: Tensor | None) -> None:
        """Use a push of a step.

        Args:
            gradients: flat; valid until the worker's next push. None if it sent none.
        """

    def update(self, gradients: list[Tensor], rate: float) -> None:
        """Update the weights with a sum of flat gradients."""
        for flat in gradients:
            self.held.add_gradients(flat)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for value in self.held.parameters:
            assert value.grad is not None
            value.grad.zero_()  # to explain a bad step, ranks compare norms: a server has none
        self.version += 1

    def counted(self) -> Mapping[str, float]:
        """Return what was counted since the start, by name."""
        return {}


class SummedUpdates(Updates):
    """One update per step, with the sum of the gradients of all workers.

    Each worker's gradients are its part of the mean over the batch: the sum is the exact gradient.
    It is made in the order of the workers, so that its bits do not depend on arrival.

    Args:
        workers: their number.
    """

    def __init__(self, held: Slice, optimizer: torch.optim.Optimizer, workers: int) -> None:
        super().__init__(held, optimizer)
        self.workers = workers
        self.pushes: dict[int, tuple[Push, Tensor | None]] = {}

    @override
    def take(self, worker: int, push: Push, gradients: Tensor | None) -> None:
        self.pushes[worker] = push, gradients
        if len(self.pushes) < self.workers:
            return
        pushes = [self.pushes[worker] for worker in range(self.workers)]
        self.pushes.clear()
        # As without servers, a step with bad gradients updates nothing; the run ends soon.
        if not any(each.kind is Kind.BAD for each, _ in pushes):
            self.update([flat for _, flat in pushes if flat is not None], push.rate)


class ArrivingUpdates(Updates):
    """One update per push, when it arrives, with the mean over the worker's samples.

    Args:
        rate_of: returns the learning rate of a push, for the number of updates that the weights
            have had since the worker got them.

    Attributes:
        delays: sum of these numbers.
    """

    def __init__(
        self,
        held: Slice,
        optimizer: torch.optim.Optimizer,
        rate_of: Callable[[Push, int], float],
    ) -> None:
        super().__init__(held, optimizer)
        self.rate_of, self.delays = rate_of, 0

    @override
    def take(self, worker: int, push: Push, gradients: Tensor | None) -> None:
        if gradients is None:
            return
        delay = self.version - push.version
        self.delays += delay
        self.update([gradients], self.rate_of(push, delay))

    @override
    def counted(self) -> Mapping[str, float]:
        return {"mean_updates_missed": self.delays / max(1, self.version)}


def rate_by_share(push: Push, delay: int) -> float:
    """Return the rate of a push under a bounded staleness: that of the worker's samples.

    The shares of all workers add up to one, so that the pushes of a step change the weights about
    as much as its one update would, with any optimizer.
    """
    return push.rate * push.weight


def rate_by_delay(push: Push, delay: int) -> float:
    """Return the rate of a push without a bound, divided by its staleness.

    Zhang et al., "Staleness-Aware Async-SGD for Distributed Deep Learning", IJCAI 2016.
    """
    return push.rate / max(1, delay)


@dataclass
class _Waiting:
    """The workers that wait for an answer.

    Attributes:
        pulls: those whose push of a step is not answered yet.
        meetings: those that wait for all others.
    """

    pulls: set[int] = field(default_factory=set)
    meetings: set[int] = field(default_factory=set)


class Server(Meetings):
    """The meetings of a server rank: it serves in every step, until all workers have made it.

    Args:
        held: its parameters.
        updates: how it updates them.
        wire: its messages.
        workers: the number of workers, which are ranks 0 to `workers` - 1.
        staleness: how many steps of others the weights of a worker may miss; None: any number.

    Attributes:
        steps: int64 [workers], pushes of each worker so far.
        differ: whether workers may hold other weights than this server now.
    """

    def __init__(
        self, held: Slice, updates: Updates, wire: Wire, workers: int, staleness: int | None
    ) -> None:
        self.held, self.updates, self.wire, self.workers = held, updates, wire, workers
        self.staleness, self.differ = staleness, False
        self.steps, self.step = np.zeros(workers, np.int64), 0
        self._waiting = _Waiting()
        self._gradients = [held.empty() for _ in range(workers)]
        self._weights: tuple[int, Tensor] | None = None  # a copy, and its version

    def after_step(self, step: int) -> None:
        """Serve until every worker has pushed its gradients of this step."""
        self.step += 1
        self.differ = self.staleness != 0
        while self.steps.min() < self.step:
            self.serve()

    def meet(self) -> None:
        """Serve until all workers wait for one another, and give them the same weights."""
        if not self.differ:
            return
        while len(self._waiting.meetings) < self.workers:
            self.serve()
        for worker in range(self.workers):
            self._answer(worker)
        self._waiting.meetings.clear()
        self.differ = False

    def averages(self) -> dict[str, Tensor]:
        """Meet for a checkpoint, which holds the servers' weights; return nothing else."""
        self.meet()
        return {}

    def counted(self) -> Mapping[str, float]:
        """Return the bytes sent, and what the updates have counted."""
        return {"sent_bytes": self.wire.sent_bytes, **self.updates.counted()}

    def serve(self) -> None:
        """Wait for one push, use it, and answer all workers that need not wait any longer."""
        arrived = wait_until(self.wire.next_push)
        assert arrived is not None, "the wait ends with a push"
        worker, push = arrived
        if push.kind is Kind.MEETING:
            self._waiting.meetings.add(worker)
            return
        gradients = None
        if push.kind is Kind.GRADIENTS:
            gradients = self._gradients[worker]
            self.wire.wait([self.wire.receive_tensor(gradients, GRADIENT, worker)])
        self.steps[worker] += 1
        assert self.steps[worker] == push.step, "a push was lost"
        self.updates.take(worker, push, gradients)
        self._waiting.pulls.add(worker)
        for waiting in sorted(self._waiting.pulls):
            if self._may_continue(waiting):
                self._waiting.pulls.remove(waiting)
                self._answer(waiting)

    def _may_continue(self, worker: int) -> bool:
        """Return whether the weights contain the steps that the worker may not miss."""
        if self.staleness is None:
            return True
        return bool(self.steps.min() >= self.steps[worker] - self.staleness)

    def _answer(self, worker: int) -> None:
        """Send the weights; each version is copied once, and lives until it is sent."""
        version = self.updates.version
        if self._weights is None or self._weights[0] != version:
            self._weights = version, self.held.copy_weights()
        self.wire.send(Answer(version, self.steps).to_array(), ANSWER, worker)
        self.wire.send_tensor(self._weights[1], WEIGHTS, worker)


def keep_only(modules: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter]) -> None:
    """Remove all parameters but these, and all buffers, from modules: a server runs no forward.

    The modules stay: their classes decide which parameters have no weight decay.
    """
    kept = {id(value) for value in parameters.values()}
    for module in (part for whole in modules.values() for part in whole.modules()):
        for name, value in module._parameters.items():
            module._parameters[name] = value if id(value) in kept else None
        for name in module._buffers:
            module._buffers[name] = None
