"""The device of a rank, a CPU or a GPU, and all that depends on which of them it is.

No other module compares the type of a device. A GPU works through a queue, its stream: a copy from
it has arrived once an event that was recorded behind the copy is over. MPI needs memory of the
host, so tensors on a GPU are copied to pinned memory and back; those on a CPU are used where they
are. Tests put a stream in place of the CPU's that delays copies (`STREAMS`).
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor

from hvdtrain.errors import UsageError
from hvdtrain.world import World

Place = tuple[str, str]  # a host and the UUID of one of its GPUs


class Mark(Protocol):
    """A place in the queue of a device, or a time of the host."""

    def __sub__(self, earlier: Any, /) -> float:
        """Return the seconds since an earlier mark; the device must have reached both."""


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Return once the device has reached it."""


class Stream(Protocol):
    """The queue of a device whose memory is not that of the host."""

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory of the host with which the device exchanges copies."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Put a copy between device and host into the queue."""

    def event(self, device: torch.device) -> Event:
        """Record an event behind all that is in the queue of a device."""

    def mark(self, device: torch.device) -> Mark:
        """Record a mark behind all that is in the queue of a device."""

    def finish(self, device: torch.device) -> None:
        """Return once a device has done all that is in its queues."""


@dataclass(frozen=True)
class GpuMark:
    """A mark in the queue of a GPU."""

    event: Any

    def __sub__(self, earlier: "GpuMark", /) -> float:
        """Return the seconds since an earlier mark."""
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class GpuStream:
    """The current streams of the GPUs."""

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return pinned memory; PyTorch does not reuse it before the copies from it are done."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Put a copy into the queue."""
        target.copy_(source, non_blocking=True)

    def event(self, device: torch.device) -> Event:
        """Record an event on the stream on which copies of this GPU's tensors run."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def mark(self, device: torch.device) -> GpuMark:
        """Record a mark on the stream on which the operations of this GPU's tensors run."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return GpuMark(event)

    def finish(self, device: torch.device) -> None:
        """Return once the GPU has done all its work, on all streams."""
        torch.cuda.synchronize(device)


STREAMS: dict[str, Stream] = {"cuda": GpuStream()}


def stage_out(tensor: Tensor) -> Tensor:
    """Return the values of a tensor in memory of the host, once the device has computed them.

    A tensor in memory of the host is returned itself.
    """
    stream = STREAMS.get(tensor.device.type)
    if stream is None:
        return tensor
    host = host_like(tensor)
    stream.copy(host, tensor.detach())
    stream.event(tensor.device).synchronize()
    return host


def host_like(tensor: Tensor) -> Tensor:
    """Return memory of the host for the values of a tensor, in its order of dimensions.

    A tensor in memory of the host is returned itself.
    """
    stream = STREAMS.get(tensor.device.type)
    if stream is None:
        return tensor
    flat = stream.host_memory((tensor.numel(),), tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


def new_host(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return memory of the host for a tensor of another shape that goes to the same device."""
    stream = STREAMS.get(like.device.type)
    if stream is None:
        return torch.empty(shape, dtype=like.dtype)
    return stream.host_memory(shape, like.dtype)


def new_target(host: Tensor, like: Tensor) -> Tensor:
    """Return the tensor that `stage_in` fills: `host` itself, where the device uses its memory."""
    if like.device.type in STREAMS:
        return torch.empty_like(host, device=like.device)
    return host


def stage_in(host: Tensor, target: Tensor) -> None:
    """Put the copy of values in memory of the host into the queue of the target's device.

    The values of `host` must not change afterwards. Nothing happens where the device uses the
    memory of the host.
    """
    stream = STREAMS.get(target.device.type)
    if stream is not None:
        stream.copy(target.detach(), host)  # autograd does not see what arrives


def copy_out(tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
    """Copy tensors into memory of the host, and return once all values are there."""
    devices = []
    for tensor, host in zip(tensors, hosts, strict=True):
        stream = STREAMS.get(tensor.device.type)
        if stream is None:
            host.copy_(tensor.detach())
        else:
            stream.copy(host, tensor.detach())
            devices.append(tensor.device)
    for device in dict.fromkeys(devices):
        STREAMS[device.type].event(device).synchronize()


def is_queued(device: torch.device) -> bool:
    """Return whether a device works through a queue, for which the host should not wait."""
    return device.type in STREAMS


def read_later(values: Sequence[Tensor], device: torch.device) -> Callable[[], list[float]]:
    """Return a function that returns the numbers in tensors of a device.

    One copy from a GPU starts at once. The function waits for it, and for all that was in the
    device's queue before it.
    """
    stream = STREAMS.get(device.type)
    if stream is None:
        return lambda: [float(value) for value in values]
    host = stream.host_memory((len(values),), torch.float64)
    if values:
        stream.copy(host, torch.stack([value.double() for value in values]))
    copied = stream.event(device)

    def read() -> list[float]:
        copied.synchronize()
        return host.tolist()

    return read


def synchronize(device: torch.device) -> None:
    """Return once the device has done all its work."""
    if stream := STREAMS.get(device.type):
        stream.finish(device)


def mark(device: torch.device) -> Mark:
    """Mark a place in the queue of a device; where there is no queue, the time now."""
    stream = STREAMS.get(device.type)
    return time.perf_counter() if stream is None else stream.mark(device)


def now(device: torch.device) -> float:
    """Return the clock in seconds after a device has done all its work."""
    synchronize(device)
    return time.perf_counter()


def is_gpu(device: torch.device) -> bool:
    """Return whether a device is a GPU."""
    return device.type == "cuda"


def is_cpu(device: torch.device) -> bool:
    """Return whether a device is the CPU: neither a GPU nor `meta`."""
    return device.type == "cpu"


def gpu_count() -> int:
    """Return the number of GPUs that this process sees, without starting CUDA on them."""
    return torch.cuda.device_count()


def gpu_name(device: torch.device | int) -> str:
    """Return the name of a GPU."""
    return torch.cuda.get_device_name(device)


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Return the context in which operations of a device compute in a dtype; None: their own."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def choose_algorithms(precision: str, deterministic: bool) -> None:
    """Set for this process which algorithms PyTorch uses, as the options of `train` say.

    PyTorch's own default rounds the factors of convolutions in fp32 to TF32.
    """
    is_rounded = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = is_rounded
    if deterministic:
        torch.backends.cudnn.benchmark = False
        # cuBLAS reads it when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # it loads a compiler
        torch.use_deterministic_algorithms(deterministic)
    # Filling new memory would cost a pass over each buffer.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def generators(device: torch.device) -> list[torch.device]:
    """Return the devices besides the CPU whose random numbers `torch.random.fork_rng` keeps."""
    return [device] if is_gpu(device) else []


def seed(device: torch.device, number: int) -> None:
    """Seed the generators that operations of a device draw from.

    Not by torch.manual_seed: it takes 0.5 ms, because it seeds the generators of all devices.
    """
    torch.default_generator.manual_seed(number)
    if is_gpu(device):
        torch.cuda.manual_seed(number)


def random_state(device: torch.device) -> Tensor | None:
    """Return the state of a GPU's generator, None for a CPU."""
    return torch.cuda.get_rng_state(device) if is_gpu(device) else None


def set_random_state(device: torch.device, state: Tensor | None) -> None:
    """Set the state of a GPU's generator; nothing happens on a CPU, or without a state."""
    if state is not None and is_gpu(device):
        torch.cuda.set_rng_state(state, device)


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of the tensors on a GPU."""
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """Return the largest `allocated_bytes` of a GPU so far, or since `forget_peak`."""
    return torch.cuda.max_memory_allocated(device)


def forget_peak(device: torch.device) -> None:
    """Let `peak_bytes` start again from what a GPU holds now; nothing happens on a CPU."""
    if is_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)


def held_bytes(device: torch.device) -> int:
    """Return the bytes that this process holds, or has reserved on its GPU.

    Memory that was freed but not returned counts.
    """
    if is_gpu(device):
        return torch.cuda.memory_reserved(device)
    return int(psutil.Process().memory_info().rss)


def free_bytes(device: torch.device, ranks: int) -> float:
    """Return the bytes that a rank may still allocate: on its GPU, or its part of the host's.

    Args:
        ranks: of the host.
    """
    if is_gpu(device):
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available / ranks)


def give_back(device: torch.device) -> None:
    """Return free memory of a GPU to the system; nothing happens on a CPU."""
    if is_gpu(device):
        torch.cuda.empty_cache()


def choose_device(name: str | None, world: World, option: str = "--device") -> torch.device:
    """Return the CPU, or the GPU of this rank: local rank modulo visible GPUs.

    Args:
        name: "cpu" or "cuda"; None: the GPU if there is one.
        option: its name in messages.

    Raises:
        UsageError: if there is no such device.
    """
    available = torch.cuda.is_available()
    if name not in (None, "cpu", "cuda"):
        raise UsageError(f"there is no device {name!r}: use cpu or cuda")
    if name == "cuda" and not available:
        raise UsageError(f"{option} cuda: PyTorch sees no GPU on this host: use {option} cpu")
    if name == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def place_of(device: torch.device) -> Place | None:
    """Return the host and the identity of a GPU; None for a CPU."""
    if not is_gpu(device):
        return None
    return socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)


def gpu_if_there_is_one() -> torch.device:
    """Return the GPU that PyTorch takes first, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ranks_on_one_gpu(places: Sequence[Place | None]) -> list[int]:
    """Return the ranks of the first GPU that several ranks have; empty if there is none.

    Args:
        places: host and GPU of each rank; None for a rank on a CPU.
    """
    for place in dict.fromkeys(places):
        ranks = [rank for rank, other in enumerate(places) if other == place]
        if place is not None and len(ranks) > 1:
            return ranks
    return []
