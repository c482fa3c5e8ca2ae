"""Transfers of tensors between stages: mpi4py buffer calls on a separate communicator.

Also the gathers among ranks that synchronised batch norm and the norm of gradients need.

Receipts are posted early and waited for late; sent tensors are kept alive until MPI has sent them.
Every message is followed by the time at which it was sent, so that the receiver can distinguish
waiting for another rank's work (a bubble) from waiting for the network (exposed communication).
Small rows are copied in front of their time, so that both are one message.
"""

import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hvdtrain.device import Mark, host_like, is_queued, mark, stage_in, stage_out
from hvdtrain.host.process import wait_until
from hvdtrain.plan.marks import Wait

if TYPE_CHECKING:
    from mpi4py import MPI

CLOCK_ROUNDS = 8
SMALL = 8192  # bytes that are copied faster than a second message is sent
TIME = struct.Struct("d")  # seconds, behind each message


@dataclass
class Receipt:
    """A posted receipt of one message.

    Attributes:
        requests: of the rows and of the time, or of both as one message.
        message: valid once the requests are complete: the rows if they are small, and the time
            on the sender's clock at which they were sent.
        sender: rank.
        host: memory of the host that MPI fills: `rows` themselves, unless they are on a GPU.
        rows: the tensor to receive into.
    """

    requests: "list[MPI.Request]"
    message: bytearray
    sender: int
    host: Tensor
    rows: Tensor


class Exchange:
    """One rank's side of all transfers.

    Args:
        communicator: of the world. It is duplicated, which is collective.
        device: of the tensors. Tensors on a GPU are transferred through pinned host memory.
        synchronous: send with MPI_Issend, which completes only once the message is received: for
            tests, so that a schedule that depends on MPI's buffering deadlocks.

    Attributes:
        waits: those of the step that runs, or ran last.
    """

    def __init__(
        self, communicator: "MPI.Comm", device: torch.device, synchronous: bool = False
    ) -> None:
        from mpi4py import MPI  # a single rank works without mpi4py

        self._mpi = MPI
        self.communicator = communicator.Dup()
        self.device = device
        self.waits: list[Wait] = []
        self._isend = self.communicator.Issend if synchronous else self.communicator.Isend
        self._sending: deque[tuple[MPI.Request, Any]] = deque()
        self._groups: dict[tuple[int, ...], MPI.Comm] = {}
        self._clock_offsets = [0.0] * communicator.size
        self.align_clocks()

    def send(self, rows: Tensor, receiver: int, tag: int) -> None:
        """Start to send rows, contiguous in memory; they must not change until `flush`."""
        rows = stage_out(rows)
        memory, stamp = self._memory(rows), TIME.pack(self.now())
        if len(memory) <= SMALL:
            message = bytearray(memory) + stamp
        else:
            request = self._isend((memory, self._mpi.BYTE), receiver, tag)
            self._sending.append((request, rows))
            message = bytearray(stamp)
        self._sending.append((self._isend(message, receiver, tag), message))
        self._drop_finished()

    def receive(self, rows: Tensor, sender: int, tag: int) -> Receipt:
        """Post the receipt of a message into `rows`, contiguous in memory."""
        host, irecv = host_like(rows), self.communicator.Irecv
        memory = self._memory(host)
        if len(memory) <= SMALL:
            message = bytearray(len(memory) + TIME.size)
            return Receipt([irecv(message, sender, tag)], message, sender, host, rows)
        message = bytearray(TIME.size)
        requests = [irecv((memory, self._mpi.BYTE), sender, tag), irecv(message, sender, tag)]
        return Receipt(requests, message, sender, host, rows)

    def wait(self, receipts: Sequence[Receipt]) -> None:
        """Wait until all messages have arrived; note the wait, split by cause."""
        queued = is_queued(self.device)
        start = time.perf_counter()
        first: Mark = mark(self.device) if queued else start
        self.complete(receipts, start)
        end = time.perf_counter()
        arrived: Mark = mark(self.device) if queued else end
        for receipt in receipts:
            if len(receipt.message) > TIME.size:
                self._memory(receipt.host)[:] = memoryview(receipt.message)[: -TIME.size]
            if receipt.host is not receipt.rows:
                stage_in(receipt.host, receipt.rows)
        sent = max(map(self.sent_at, receipts))
        bubble = min(max(0.0, sent - start), end - start)
        self.waits.append(Wait(first, arrived, mark(self.device), end - start - bubble))

    def now(self) -> float:
        """Return the time at which a message that is sent now leaves this rank."""
        return time.perf_counter()

    def complete(self, receipts: Sequence[Receipt], start: float) -> None:
        """Return once all messages are in memory.

        Args:
            start: when the wait started.
        """
        self._wait_all([request for receipt in receipts for request in receipt.requests])

    def sent_at(self, receipt: Receipt) -> float:
        """Return when a message that has arrived was sent, on this rank's clock."""
        (sent,) = TIME.unpack_from(receipt.message, len(receipt.message) - TIME.size)
        return float(sent + self._clock_offsets[receipt.sender])

    def flush(self) -> None:
        """Wait until all sends are complete."""
        if not self._sending:
            return
        start = mark(self.device)
        self._wait_all([request for request, _ in self._sending])
        self._sending.clear()
        self._transferred(start)

    def all_gather_among(self, ranks: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        """Return a blocking all-gather among `ranks`: [k] to [len(ranks), k], in their order.

        Collective: every rank of the world must call this, in the same order of calls.
        """
        if ranks not in self._groups:
            inside = self.communicator.rank in ranks
            color = 0 if inside else self._mpi.UNDEFINED
            key = ranks.index(self.communicator.rank) if inside else 0
            self._groups[ranks] = self.communicator.Split(color, key)
        group = self._groups[ranks]

        def gather(tensor: Tensor) -> Tensor:
            start = mark(self.device)
            row = stage_out(tensor.contiguous())
            rows = torch.empty((len(ranks), *row.shape), dtype=row.dtype)
            sent, received = ([self._memory(part), self._mpi.BYTE] for part in (row, rows))
            wait_until(group.Iallgather(sent, received).Test)
            self._transferred(start)
            return rows.to(tensor.device)

        return gather

    def gather_all(self, tensor: Tensor) -> Tensor:
        """Gather a tensor [k] of every rank as [ranks, k]; blocking and collective."""
        return self.all_gather_among(tuple(range(self.communicator.size)))(tensor)

    def align_clocks(self) -> None:
        """Measure the offsets of other hosts' clocks. Collective; ranks of a host share a clock.

        Takes the offset of the fastest of a few round trips (Mills, NTP, RFC 5905, section 8).
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
        # A rank's time plus its to_first is rank 0's time.
        offsets = np.array(comm.allgather(to_first))
        self._clock_offsets = (offsets - offsets[comm.rank]).tolist()

    def offset_to_first_clock(self) -> float:
        """Return the seconds to add to this rank's clock to get rank 0's."""
        return float(-self._clock_offsets[0])

    def _transferred(self, start: Mark) -> None:
        """Note a wait in which all had been sent already."""
        end = mark(self.device)
        self.waits.append(Wait(start, start, end, 0.0))

    def _wait_all(self, requests: "list[MPI.Request]") -> None:
        if len(requests) == 1:
            wait_until(requests[0].Test)
        else:
            wait_until(partial(self._mpi.Request.Testall, requests))

    def _memory(self, tensor: Tensor) -> Any:
        """Return the memory of a tensor that is contiguous in any order of its dimensions."""
        return self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)

    def _drop_finished(self) -> None:
        """Release tensors whose sends are complete, in order; testing also progresses the rest."""
        while self._sending and self._sending[0][0].Test():
            self._sending.popleft()


def _round_trip(comm: "MPI.Comm") -> tuple[float, float]:
    """Return (duration, offset of rank 0's clock) of one round trip to rank 0."""
    start = time.perf_counter()
    comm.send(None, 0)
    theirs = comm.recv(source=0)
    end = time.perf_counter()
    return end - start, theirs - (start + end) / 2
