"""A parameter server: ranks that hold the weights, and the workers that train with them.

Workers push gradients and get the weights back. Servers run the same training loop as workers: a
step of a server is over once every worker has pushed its gradients of that step, so that all ranks
take decisions at the same step. A server serves in its main thread: whatever it does between two
steps waits for no worker that waits for the server.

What is lost with a server or a worker: everything since the last checkpoint, as with any rank. All
ranks end, because no other rank holds the slice. There is no copy of it between checkpoints.

Messages are two-sided messages of MPI on a communicator of their own. A worker sends a push to
each server, and gets one answer to each push: the server's weights. Between two ranks MPI keeps
the order of messages with one tag, so that an answer always belongs to the newest push.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from enum import IntEnum
from inspect import unwrap
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from hvdtrain import world
from hvdtrain.host.process import wait_until
from hvdtrain.plan.cut import Share
from hvdtrain.plan.trace import Reduction
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.gradients import Gradients, SerialGradients
from hvdtrain.sync.local import Meetings, weighted_average
from hvdtrain.sync.states import CopiedStates, Replica, Slice, States

if TYPE_CHECKING:
    from mpi4py import MPI

Request: TypeAlias = "MPI.Request"
PUSH, GRADIENT, ANSWER, WEIGHTS = range(4)  # tags


class Kind(IntEnum):
    """The content of a push."""

    GRADIENTS = 0  # a second message has them
    EMPTY = 1  # the worker had no samples in this step
    BAD = 2  # its gradients are not finite, and are not sent
    MEETING = 3  # no step: the worker waits until all of them have applied the same updates


@dataclass(frozen=True)
class Push:
    """The first message of a push.

    Attributes:
        kind: of the content.
        step: number of the worker's pushes so far, with this one, meetings not counted.
        rate: learning rate of the step.
        weight: the worker's samples divided by those of the batch.
        version: of the server's weights that the gradients were computed with.
    """

    kind: Kind
    step: int
    rate: float = 0.0
    weight: float = 0.0
    version: int = 0

    def to_array(self) -> np.ndarray:
        """Return the message: float64 [5]."""
        return np.array(astuple(self), np.float64)

    @classmethod
    def of(cls, values: np.ndarray) -> "Push":
        """Return the push in a message."""
        kind, step, rate, weight, version = values.tolist()
        return cls(Kind(int(kind)), int(step), rate, weight, int(version))


@dataclass(frozen=True)
class Answer:
    """The updates that the weights of an answer contain.

    Attributes:
        version: number of the server's updates.
        steps: int64 [workers], pushes of each worker that the weights contain.
    """

    version: int
    steps: np.ndarray

    def to_array(self) -> np.ndarray:
        """Return the message: int64 [1 + workers]."""
        return np.array([self.version, *self.steps], np.int64)

    @classmethod
    def of(cls, values: np.ndarray) -> "Answer":
        """Return the answer in a message."""
        return cls(int(values[0]), values[1:].copy())


class Wire:
    """One rank's side of the messages.

    Args:
        communicator: of all workers and servers, for these messages only.

    Attributes:
        sent_bytes: of gradients and weights so far, without the messages that announce them.
    """

    def __init__(self, communicator: "MPI.Comm") -> None:
        self.communicator, self._mpi = communicator, world.mpi()
        self.sent_bytes = 0.0
        self._sending: list[tuple[Request, np.ndarray]] = []

    def send(self, head: np.ndarray, tag: int, receiver: int) -> None:
        """Start to send a first message."""
        self._sending = [pair for pair in self._sending if not pair[0].Test()]
        self._sending.append((self.communicator.Isend(head, receiver, tag), head))

    def send_tensor(self, flat: Tensor, tag: int, receiver: int) -> None:
        """Start to send a tensor [n] of the CPU, which must not change before `flush`."""
        self.sent_bytes += flat.nbytes
        self.send(_bytes(flat), tag, receiver)

    def receive(self, head: np.ndarray, tag: int, sender: int) -> Request:
        """Start to receive a first message."""
        return self.communicator.Irecv(head, sender, tag)

    def receive_tensor(self, flat: Tensor, tag: int, sender: int) -> Request:
        """Start to receive a tensor [n] of the CPU."""
        return self.communicator.Irecv(_bytes(flat), sender, tag)

    def next_push(self) -> tuple[int, Push] | None:
        """Return the sender and the content of a push that has arrived, if there is one."""
        status = self._mpi.Status()
        message = self.communicator.Improbe(self._mpi.ANY_SOURCE, PUSH, status)
        if message is None:
            return None
        values = Push(Kind.EMPTY, 0).to_array()
        message.Recv(values)
        return status.Get_source(), Push.of(values)

    def wait(self, requests: Sequence[Request]) -> None:
        """Wait for messages without taking the core."""
        requests = list(requests)
        wait_until(lambda: self._mpi.Request.Testall(requests))

    def flush(self) -> None:
        """Wait until all messages are sent."""
        self.wait([request for request, _ in self._sending])
        self._sending.clear()


def _bytes(flat: Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor [n] as bytes."""
    return flat.view(torch.uint8).numpy()


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
