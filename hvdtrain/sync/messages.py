"""Messages between workers, which train, and servers, which hold the weights.

Two-sided messages of MPI on a communicator of their own. A worker sends a push to each server, and
gets one answer to each push: the server's weights. Between two ranks MPI keeps the order of
messages with one tag, so that an answer always belongs to the newest push.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hvdtrain import world
from hvdtrain.host.process import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

PUSH, GRADIENT, ANSWER, WEIGHTS = range(4)  # tags
Request: TypeAlias = "MPI.Request"


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
