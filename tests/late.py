"""A device that is late: its memory is that of CPU tensors, its copies take place when awaited.

It stands in for the stream of a GPU where there is none. What is copied to the host is not a
number until an event behind the copy was waited for; what is copied to the device must not change
on the host before that.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvdtrain import device

CPU = torch.device("cpu")
NOT_YET = 101  # fills integers that have not arrived


@dataclass(eq=False)
class LateStream:
    """The queue of the late device.

    Attributes:
        queue: what was put into it.
        done: how much of it the device has done.
        hosts: memory of the host that copies may use.
    """

    queue: list[Callable[[], None]] = field(default_factory=list)
    done: int = 0
    hosts: list[Tensor] = field(default_factory=list)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        memory = torch.empty(shape, dtype=dtype)
        self.hosts.append(_not_yet(memory))
        return memory

    def copy(self, target: Tensor, source: Tensor) -> None:
        value = source.clone()
        if self._is_host(target):  # the stream's order: it gets the value of now, but later
            _not_yet(target)
            self.queue.append(lambda: _set(target, value))
            return
        assert self._is_host(source), "neither side of a copy is memory of the host"
        target.copy_(source)
        self.queue.append(lambda: _assert_unchanged(source, value))

    def mark(self, device: torch.device = CPU) -> "LateMark":
        self.queue.append(_nothing)  # no mark is reached before something waits
        return LateMark(self.event(), time.perf_counter())

    def finish(self, device: torch.device = CPU) -> None:
        self.event().synchronize()

    def event(self, device: torch.device = CPU) -> "LateEvent":
        return LateEvent(self, len(self.queue))

    def _is_host(self, tensor: Tensor) -> bool:
        place = tensor.untyped_storage().data_ptr()
        return any(place == memory.untyped_storage().data_ptr() for memory in self.hosts)


@dataclass(frozen=True)
class LateEvent:
    stream: LateStream
    place: int

    def synchronize(self) -> None:
        for act in self.stream.queue[self.stream.done : self.place]:
            act()
        self.stream.done = max(self.stream.done, self.place)


@dataclass(frozen=True)
class LateMark:
    """A mark, which is in the queue too: it is not reached before what was put there."""

    event: LateEvent
    time: float

    def __sub__(self, earlier: "LateMark", /) -> float:
        for mark in (self, earlier):
            assert mark.event.place <= mark.event.stream.done, "the device has not reached a mark"
        return self.time - earlier.time


@contextmanager
def late_device() -> Iterator[LateStream]:
    """Let CPU tensors be those of a late device; at the end it does what is left."""
    stream = LateStream()
    device.STREAMS["cpu"] = stream
    try:
        yield stream
        stream.event().synchronize()
    finally:
        del device.STREAMS["cpu"]


def _not_yet(memory: Tensor) -> Tensor:
    return memory.fill_(torch.nan if memory.is_floating_point() else NOT_YET)


def _nothing() -> None:
    """Do nothing: the place of a mark in the queue."""


def _set(target: Tensor, value: Tensor) -> None:
    target.copy_(value)


def _assert_unchanged(source: Tensor, value: Tensor) -> None:
    same = torch.allclose(source, value, rtol=0, atol=0, equal_nan=True)
    assert same, "memory of the host changed while it was copied"
