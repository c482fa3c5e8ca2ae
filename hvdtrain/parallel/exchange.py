"""Transfers of tensors between ranks by mpi4py, and the boundaries between stages.

Also the gathers among ranks that synchronised batch norm and the norm of gradients need.

Receipts are posted early and waited for late; sent tensors are kept alive until MPI has sent them.
Every message is followed by the time at which it was sent, so that the receiver can distinguish
waiting for another rank's work (a bubble) from waiting for the network (exposed communication).
Small rows are copied in front of their time, so that both are one message.

Rows of a boundary that come from another rank arrive in the buffer in which they are used; rows of
the same rank's other stage are taken as they are. A buffer returns to its pool once nothing reads
it.
"""

import socket
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.device import Mark, host_like, is_queued, mark, stage_in, stage_out
from hvdtrain.host.process import wait_until
from hvdtrain.plan.cut import boundary
from hvdtrain.plan.schedule import Task
from hvdtrain.plan.trace import Wait

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
        communicator: of the world, as of `World`. It is duplicated, which is collective.
        device: of the tensors. Tensors on a GPU are transferred through pinned host memory.
        synchronous: send with MPI_Issend, which completes only once the message is received: for
            tests, so that a schedule that depends on MPI's buffering deadlocks.

    Attributes:
        waits: those of the step that runs, or ran last.
    """

    def __init__(self, communicator: Any, device: torch.device, synchronous: bool = False) -> None:
        self.communicator = communicator.Dup()
        self.device = device
        self.waits: list[Wait] = []
        self._isend = self.communicator.Issend if synchronous else self.communicator.Isend
        self._sending: deque[tuple[MPI.Request, Any]] = deque()
        self._groups: dict[tuple[int, ...], MPI.Comm] = {}
        self._clock_offsets = [0.0] * communicator.size
        self.align_clocks()

    @cached_property
    def _mpi(self) -> Any:
        """Return the module of MPI, which gathers of torchrun's ranks do without."""
        from mpi4py import MPI

        return MPI

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
            key = ranks.index(self.communicator.rank) if inside else 0
            self._groups[ranks] = self.communicator.Split(int(inside), key)
        group = self._groups[ranks]

        def gather(tensor: Tensor) -> Tensor:
            start = mark(self.device)
            row = stage_out(tensor.contiguous())
            rows = torch.empty((len(ranks), *row.shape), dtype=row.dtype)
            memories = (part.view(-1).view(torch.uint8).numpy() for part in (row, rows))
            wait_until(group.Iallgather(*memories).Test)
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


@dataclass(frozen=True)
class Form:
    """Shape, dtype and memory format of one sample at a boundary between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, batch: Tensor) -> "Form":
        """Return the form of the samples of `batch`, [n, ...].

        n must be above 1: the strides of a single sample do not show its memory format.
        """
        is_last = batch.dim() == 4 and batch.is_contiguous(memory_format=torch.channels_last)
        return cls(tuple(batch.shape[1:]), batch.dtype, is_last and not batch.is_contiguous())

    @property
    def row_bytes(self) -> int:
        """Bytes per sample."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def empty(self, rows: int, device: torch.device) -> Tensor:
        """Return a new tensor [rows, *shape] in which each sample is contiguous."""
        with torch.inference_mode(False):  # the buffer is reused outside of inference mode
            return torch.empty(
                (rows, *self.shape), dtype=self.dtype, device=device, memory_format=self._format
            )

    def arranged(self, batch: Tensor) -> Tensor:
        """Return `batch` in this memory format; copy it only if needed.

        Raises:
            RuntimeError: if the shape or dtype differs, because receivers allocate by the form.
        """
        if batch.shape[1:] != self.shape or batch.dtype != self.dtype:
            raise RuntimeError(
                f"a component emitted samples of {tuple(batch.shape[1:])} {batch.dtype} instead "
                f"of {self.shape} {self.dtype}: it must emit the same shape and dtype each time"
            )
        return batch.contiguous(memory_format=self._format)

    @property
    def _format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format


class Boundaries:
    """One rank's side of all boundaries.

    Args:
        rank: this rank.
        forms: the form of a sample at each boundary; boundary s lies between stages s and s + 1.
        exchange: None if this rank exchanges with no other.
    """

    def __init__(
        self, rank: int, forms: Sequence[Form], exchange: Exchange | None, device: torch.device
    ) -> None:
        self.rank, self.forms, self.exchange, self.device = rank, forms, exchange, device
        self._posted: dict[tuple[bool, tuple[int, int]], tuple[Tensor, list[Receipt]]] = {}
        self._pool: dict[tuple[Form, int], list[Tensor]] = defaultdict(list)
        self._in_use: dict[tuple[int, int], list[tuple[tuple[Form, int], Tensor]]] = {}

    def post(self, task: Task) -> None:
        """Post the receipt of rows from other ranks: RECV."""
        assert self.exchange is not None, "no exchange: a single rank receives nothing"
        is_gradient = task.action.kind == "RECV_B"
        buffer = self._acquire(task, is_gradient)
        receipts = [
            self.exchange.receive(buffer[slice(*lane.local)], lane.peer, task.tag)
            for lane in task.lanes
        ]
        self._posted[is_gradient, task.key] = buffer, receipts

    def collect(self, task: Task, is_gradient: bool, local: Tensor | None) -> Tensor:
        """Return all rows that `task` needs: activations, or gradients of its output.

        Args:
            local: the output of this rank's neighbouring stage, if some of the rows are in it.
        """
        local_lanes = [lane for lane in task.lanes if lane.peer == self.rank]
        if local_lanes and len(task.lanes) == 1 and _is_all(local_lanes[0].remote, local):
            assert local is not None
            return local.detach()
        buffer, receipts = self._posted.pop((is_gradient, task.key), (None, []))
        if buffer is None:
            buffer = self._acquire(task, is_gradient)
        for lane in local_lanes:
            assert local is not None, f"{task.line}: this rank's rows are missing"
            buffer[slice(*lane.local)].copy_(local[slice(*lane.remote)])
        if receipts:
            assert self.exchange is not None
            self.exchange.wait(receipts)
        return buffer.detach()

    def send(self, task: Task, output: Tensor) -> None:
        """Start to send rows of `output` to other ranks: SEND."""
        assert self.exchange is not None, "no exchange: a single rank sends nothing"
        arranged = self._form(task).arranged(output)
        for lane in task.lanes:
            self.exchange.send(arranged[slice(*lane.local)], lane.peer, task.tag)

    def release(self, key: tuple[int, int]) -> None:
        """Return the buffers of this (stage, micro-batch) to their pools."""
        for kind, buffer in self._in_use.pop(key, ()):
            self._pool[kind].append(buffer)

    def is_pooled(self, key: tuple[int, int], tensor: Tensor) -> bool:
        """Return whether `tensor` lies in a buffer that `release` would free for reuse."""
        storage = tensor.untyped_storage().data_ptr()
        return any(
            buffer.untyped_storage().data_ptr() == storage
            for _, buffer in self._in_use.get(key, ())
        )

    def _form(self, task: Task) -> Form:
        return self.forms[boundary(task.action.stage, task.action.kind)]

    def _acquire(self, task: Task, is_gradient: bool) -> Tensor:
        kind = self.forms[task.key[0] - (not is_gradient)], task.rows
        pool = self._pool[kind]
        buffer = pool.pop() if pool else kind[0].empty(task.rows, self.device)
        self._in_use.setdefault(task.key, []).append((kind, buffer))
        return buffer


def _is_all(rows: tuple[int, int], tensor: Tensor | None) -> bool:
    return tensor is not None and rows == (0, len(tensor))


def to_channels_last(module: nn.Module) -> None:
    """Give tensors of four dimensions channels_last format; Module.to fails for those of five.

    A GroupNorm gets an input without a gradient, such as images or what frozen layers emit, in
    contiguous format: in channels_last format PyTorch's backward would crash (see `halves`).
    """
    for layer in module.modules():
        if isinstance(layer, nn.GroupNorm):
            layer.register_forward_pre_hook(_contiguous_if_constant)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


def keeping_format(activations: Tensor) -> Tensor:
    """Return activations whose gradient will have channels_last format if they have it.

    The gradient of a Flatten has not. The component before it would then compute its backward in
    two formats, with copies of larger tensors than this one.
    """
    if activations.requires_grad and activations.dim() == 4 and _is_channels_last(activations):
        activations.register_hook(_as_channels_last)
    return activations


def _contiguous_if_constant(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    is_constant = torch.is_grad_enabled() and not any(one.requires_grad for one in inputs)
    return tuple(one.contiguous() for one in inputs) if is_constant else None


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _as_channels_last(gradient: Tensor) -> Tensor:
    return gradient.contiguous(memory_format=torch.channels_last)
