"""Times the compression of each component's gradients on this rank, by the code of training.

All ranks measure the same component at the same time, because they share caches and memory in a
step, too. Nothing travels: the replicas are imagined to send the same.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.device import now
from hvdtrain.options.requests import NoCompression, parse_compress_request
from hvdtrain.planner.agreement import FREE, Coding
from hvdtrain.planner.chain import repeated
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.compress import make_sums
from hvdtrain.sync.gradients import make_bucket
from hvdtrain.world import World


class Imagined:
    """The collective operations of several replicas, as if the others existed.

    Attributes:
        seconds: of the operations themselves, which are no part of the compression.
    """

    place, sent_bytes, scale = 0, 0.0, 1.0

    def __init__(self, size: int) -> None:
        self.size, self.seconds = size, 0.0

    def prepare(self, names: Sequence[str]) -> None:
        """Do nothing."""

    def all_reduce(self, tensor: Tensor, name: str) -> Tensor:
        """Return the tensor."""
        return tensor

    def all_gather(self, tensor: Tensor, name: str) -> Tensor:
        """Return a copy of the tensor for each replica."""
        started = time.perf_counter()
        rows = tensor[None].repeat(self.size, 1)
        self.seconds += time.perf_counter() - started
        return rows

    def reduce_scatter(self, tensor: Tensor, name: str) -> Tensor:
        """Return the first slice."""
        return tensor.view(self.size, -1)[0]

    def all_to_all(self, tensor: Tensor, name: str) -> Tensor:
        """Return the slices."""
        return tensor.view(self.size, -1)

    def progress(self) -> None:
        """Do nothing."""

    def wait(self, handle: Any) -> Tensor:
        """Return the result."""
        result: Tensor = handle
        return result


def measure_coding(
    parameters_of: Callable[[str], Mapping[str, nn.Parameter]],
    names: Sequence[str],
    methods: Sequence[str],
    replicas: int,
    world: World,
) -> dict[str, dict[str, Coding]]:
    """Return the seconds of each method for each component. Collective.

    Args:
        parameters_of: returns the trainable parameters of a component by name.
        methods: values of `--compress`.
        replicas: number that sends to each other.
    """
    measured: dict[str, dict[str, Coding]] = {}
    for name in names:
        parameters = parameters_of(name)
        measured[name] = {}
        for method in methods:
            world.barrier()
            measured[name][method] = coding_of(parameters, method, Imagined(replicas))
    return measured


def coding_of(
    parameters: Mapping[str, nn.Parameter], method: str, collectives: Imagined
) -> Coding:
    """Return the seconds of compressing random gradients, and of decompressing their sums."""
    if not parameters or collectives.size == 1:
        return FREE
    bucket = make_bucket("gradients", parameters, [])
    operations: Collectives = collectives
    request = parse_compress_request(method)
    if not isinstance(request, NoCompression):
        request = replace(request, after=0)
    sums = make_sums(request, operations)
    sums.attach([bucket])
    device = bucket.flat.device

    def once() -> tuple[float, float]:
        bucket.flat.normal_()
        started, collectives.seconds = now(device), 0.0
        handle = sums.start(bucket)
        sent, travelling = now(device), collectives.seconds
        sums.finish(bucket, handle)
        received, travelled = now(device), collectives.seconds
        sums.after_update()
        return sent - started - travelling, received - sent - (travelled - travelling)

    state = torch.get_rng_state()
    with torch.no_grad():
        encode, decode = np.median(repeated(once), axis=0).tolist()
    torch.set_rng_state(state)
    for parameter in parameters.values():
        parameter.grad = None
    return Coding(max(0.0, encode), max(0.0, decode))
