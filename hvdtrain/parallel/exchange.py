"""Handing tensors from rank to rank: mpi4py buffer calls on a communicator of our own.

Receipts are posted early and waited for late; what is sent is kept alive until MPI is done with
it. Every message is followed by the time at which it was sent, so that the receiver can tell
waiting for another rank's work (a bubble) from waiting for the wire (exposed communication).
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hvdtrain.parallel.waiting import WaitTime
from hvdtrain.poll import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

CLOCK_ROUNDS = 8


@dataclass
class Receipt:
    """A message on its way: where it goes, and when it was sent, once `requests` are done."""

    requests: "list[MPI.Request]"
    sent_at: np.ndarray
    sender: int
    host: Tensor | None  # pinned memory, if `rows` are on a GPU
    rows: Tensor


class Exchange:
    """One rank's side of all hand-overs.

    Args:
        communicator: of the world; it is duplicated. Collective.
        device: where tensors are. From a GPU they go through pinned memory of the host.
        synchronous: send with MPI_Issend, which ends only once it is received: a schedule that
            leans on MPI's buffering deadlocks then (for tests).
    """

    def __init__(
        self, communicator: "MPI.Comm", device: torch.device, synchronous: bool = False
    ) -> None:
        from mpi4py import MPI  # a process that exchanges with nobody needs none

        self._mpi = MPI
        self.communicator = communicator.Dup()
        self.device = device
        self.waited = WaitTime()
        self._isend = self.communicator.Issend if synchronous else self.communicator.Isend
        self._sending: deque[tuple[MPI.Request, Any]] = deque()
        self._groups: dict[tuple[int, ...], MPI.Comm] = {}
        self._clock_offsets = np.zeros(communicator.size)
        self.align_clocks()

    def send(self, rows: Tensor, receiver: int, tag: int) -> None:
        """Start to send samples, contiguous in memory; they must not change until `flush`."""
        if rows.device.type == "cuda":
            rows = rows.detach().to("cpu", copy=True)  # waits for the stream
        now = np.array([time.perf_counter()])
        self._drop_finished()
        for kept, buffer in ((rows, self._bytes_of(rows)), (now, now)):
            self._sending.append((self._isend(buffer, receiver, tag), kept))

    def receive(self, rows: Tensor, sender: int, tag: int) -> Receipt:
        """Post the receipt of samples into `rows`, contiguous in memory."""
        host = None
        if rows.device.type == "cuda":
            host = torch.empty(
                rows.numel() * rows.element_size(), dtype=torch.uint8, pin_memory=True
            )
        sent_at = np.empty(1)
        target = self._bytes_of(rows if host is None else host)
        requests = [
            self.communicator.Irecv(target, sender, tag),
            self.communicator.Irecv(sent_at, sender, tag),
        ]
        return Receipt(requests, sent_at, sender, host, rows)

    def wait(self, receipts: Sequence[Receipt]) -> WaitTime:
        """Return once all of them have arrived."""
        began = time.perf_counter()
        self._wait_all([request for receipt in receipts for request in receipt.requests])
        for receipt in receipts:
            if receipt.host is not None:
                _flat(receipt.rows).copy_(receipt.host.view(receipt.rows.dtype))
        ended = time.perf_counter()
        sent = max(
            float(receipt.sent_at[0]) + self._clock_offsets[receipt.sender] for receipt in receipts
        )
        bubble = min(max(0.0, sent - began), ended - began)
        waited = WaitTime(bubble, ended - began - bubble)
        self.waited.bubble += waited.bubble
        self.waited.transfer += waited.transfer
        return waited

    def flush(self) -> float:
        """Return once everything sent is through; the seconds that took."""
        if not self._sending:
            return 0.0
        began = time.perf_counter()
        self._wait_all([request for request, _ in self._sending])
        self._sending.clear()
        seconds = time.perf_counter() - began
        self.waited.transfer += seconds
        return seconds

    def gatherer(self, ranks: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        """A blocking all-gather among `ranks`: [k] to [len(ranks), k] in their order. Collective.

        Every rank of the world has to ask for it, in the same order of calls.
        """
        if ranks not in self._groups:
            inside = self.communicator.rank in ranks
            color = 0 if inside else self._mpi.UNDEFINED
            key = ranks.index(self.communicator.rank) if inside else 0
            self._groups[ranks] = self.communicator.Split(color, key)
        group = self._groups[ranks]

        def gather(tensor: Tensor) -> Tensor:
            began = time.perf_counter()
            mine = tensor.detach().cpu().contiguous()
            found = torch.empty((len(ranks), *mine.shape), dtype=mine.dtype)
            wait_until(group.Iallgather(self._bytes_of(mine), self._bytes_of(found)).Test)
            self.waited.transfer += time.perf_counter() - began
            return found.to(tensor.device)

        return gather

    def gather_all(self, tensor: Tensor) -> Tensor:
        """A blocking all-gather among all ranks: [k] to [ranks, k]. Collective."""
        return self.gatherer(tuple(range(self.communicator.size)))(tensor)

    def align_clocks(self) -> None:
        """Measure how far other hosts' clocks are ahead. Collective; ranks of a host share one.

        The offset of the fastest of a few round trips (Mills, NTP, RFC 5905, section 8).
        """
        comm, hosts = self.communicator, self.communicator.allgather(socket.gethostname())
        to_first = 0.0
        for other in range(1, comm.size):
            if hosts[other] == hosts[0] or comm.rank not in (0, other):
                continue
            if comm.rank == 0:
                for _ in range(CLOCK_ROUNDS):
                    comm.recv(source=other)
                    comm.send(time.perf_counter(), other)
            else:
                to_first = min(_round_trip(comm) for _ in range(CLOCK_ROUNDS))[1]
        # Adding to_first turns a clock into rank 0's.
        offsets = np.array(comm.allgather(to_first))
        self._clock_offsets = offsets - offsets[comm.rank]

    def to_first_clock(self) -> float:
        """Seconds to add to this rank's clock to have rank 0's."""
        return float(-self._clock_offsets[0])

    def _wait_all(self, requests: "list[MPI.Request]") -> None:
        wait_until(lambda: self._mpi.Request.Testall(requests))

    def _bytes_of(self, tensor: Tensor) -> list[Any]:
        """The memory of a tensor that is contiguous in some order, as mpi4py takes it."""
        length = tensor.numel() * tensor.element_size()
        return [self._mpi.buffer.fromaddress(tensor.data_ptr(), length), self._mpi.BYTE]

    def _drop_finished(self) -> None:
        """Let tensors go whose sends are through, in order; this also moves the others on."""
        while self._sending and self._sending[0][0].Test():
            self._sending.popleft()


def _round_trip(comm: "MPI.Comm") -> tuple[float, float]:
    """(duration, offset of rank 0's clock) of one round trip to rank 0."""
    began = time.perf_counter()
    comm.send(None, 0)
    theirs = comm.recv(source=0)
    ended = time.perf_counter()
    return ended - began, theirs - (began + ended) / 2


def _flat(rows: Tensor) -> Tensor:
    """The samples as one row of numbers, in the order of memory."""
    return rows.as_strided((rows.numel(),), (1,))
