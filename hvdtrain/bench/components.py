"""Measures the forward and backward of each component on this rank."""

import statistics
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from hvdtrain.parallel.runtime import Runtime
from hvdtrain.parallel.stage import Part

REPEATS = 3


def component_seconds(
    runtime: Runtime, inputs: Mapping[int, Tensor], repeats: int = REPEATS
) -> dict[str, tuple[float, float]]:
    """Return the median seconds of (forward, backward) of each component, run by plain autograd.

    Gradients are set to zero afterwards. Weights do not change, but the statistics of batch norms
    do.

    Args:
        inputs: input of each stage of this rank, such as random activations.
    """
    seconds_of: dict[str, list[tuple[float, float]]] = {}
    for _ in range(repeats + 1):
        for stage, part in runtime.parts.items():
            for name, pair in _chain(runtime, part, inputs[stage]).items():
                seconds_of.setdefault(name, []).append(pair)
            part.gradients.zero()
    return {
        name: (
            statistics.median(forward for forward, _ in times[1:]),
            statistics.median(backward for _, backward in times[1:]),
        )
        for name, times in seconds_of.items()
    }


def _chain(runtime: Runtime, part: Part, inputs: Tensor) -> dict[str, tuple[float, float]]:
    """Run the forwards one after another, each on its own leaf, then the backwards."""
    leaves: list[Tensor] = []
    emitted: list[Tensor] = []
    forward: list[float] = []
    activations = inputs
    for component in part.model.calls.values():
        # The first stage's images need no gradient, as in training.
        needs_gradient = bool(emitted) or activations.requires_grad
        leaf = activations.detach().requires_grad_(needs_gradient)
        began = _now(runtime)
        with runtime.autocast():
            activations = component(leaf)
        forward.append(_now(runtime) - began)
        leaves.append(leaf)
        emitted.append(activations)
    gradient = torch.ones_like(activations) / activations.numel()
    backward = []
    for leaf, output in zip(reversed(leaves), reversed(emitted), strict=True):
        began = _now(runtime)
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        backward.append(_now(runtime) - began)
        gradient = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
    return dict(
        zip(part.model.components, zip(forward, reversed(backward), strict=True), strict=True)
    )


def _now(runtime: Runtime) -> float:
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)
    return time.perf_counter()
