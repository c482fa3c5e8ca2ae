"""Seconds of forward and backward of each component on this rank."""

import statistics
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from hvdtrain.parallel.part import Part
from hvdtrain.parallel.runtime import Runtime

REPEATS = 3


def component_seconds(
    runtime: Runtime, inputs: Mapping[int, Tensor], repeats: int = REPEATS
) -> dict[str, tuple[float, float]]:
    """Median seconds of (forward, backward) of each component, run as a chain by plain autograd.

    Gradients that this leaves behind are dropped; weights are as before, statistics of batch
    norms are not.

    Args:
        inputs: what each stage of this rank reads, such as random activations.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(repeats + 1):
        for stage, part in runtime.parts.items():
            for name, seconds in _chain(runtime, part, inputs[stage]).items():
                found.setdefault(name, []).append(seconds)
            part.gradients.zero()
    return {
        name: (
            statistics.median(forward for forward, _ in times[1:]),
            statistics.median(backward for _, backward in times[1:]),
        )
        for name, times in found.items()
    }


def _chain(runtime: Runtime, part: Part, given: Tensor) -> dict[str, tuple[float, float]]:
    """Forward one component after another, each on a leaf of its own; then backward."""
    leaves: list[Tensor] = []
    emitted: list[Tensor] = []
    forward: list[float] = []
    activations = given
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
