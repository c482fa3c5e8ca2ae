"""A comparison of the speed of bf16 and of fp32, the default of `train`, on this machine."""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.doctor.check import Check

EQUAL = 1.1  # a smaller difference is not worth a choice
SECONDS = 0.6  # spent on each kind of work
MOST_ROUNDS, FEWEST_ROUNDS = 30, 5
KINDS = ("matrices", "convolutions")
# Rows of the matrices and images of the convolution: per thread of a CPU, and per GPU.
SIZES = {"cpu": (256, 8), "cuda": (8192, 512)}
WIDTH, CHANNELS, PIXELS = 512, 64, 16
# Waiting threads then use no processor time, which is the quantity measured on CPUs.
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}

Action = Callable[[bool], None]


def bf16_speedups() -> dict[str, Any]:
    """Measure the speed-up of bf16 over fp32 on the device and threads of one rank.

    Returns:
        `device` ("cpu" or "cuda"), `threads`, and `speedups` by kind of work.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    device, threads = "cuda" if torch.cuda.is_available() else "cpu", torch.get_num_threads()
    speedups = {
        kind: _speedup(action, time.process_time if device == "cpu" else time.perf_counter)
        for kind, action in zip(KINDS, _actions(device, threads), strict=True)
    }
    return {"device": device, "threads": threads, "speedups": speedups}


def precision_check(facts: Mapping[str, Any] | None, reason: str) -> Check:
    """Return which precision is faster, and the option for it: information, never a fault.

    Args:
        facts: result of `bf16_speedups`, None if it failed.
        reason: why it failed.
    """
    name = "precision"
    if facts is None:
        return Check(name, "note", f"fp32 and bf16 were not compared: {reason}")
    speedups: dict[str, float] = facts["speedups"]
    ratio = statistics.geometric_mean(speedups.values())
    time = "time" if facts["device"] == "cuda" else "processor time"
    if 1 / EQUAL <= ratio <= EQUAL:
        text, option = "bf16 and fp32 are about equally fast", "keep the default, --precision fp32"
    elif ratio > 1:
        text, option = f"fp32 takes {ratio:.1f}x the {time} of bf16", "train --precision bf16"
    else:
        text, option = f"bf16 takes {1 / ratio:.1f}x the {time} of fp32", "train --precision fp32"
    threads = facts["threads"]
    where = f"{threads} thread{'s' if threads > 1 else ''}"
    where = "the GPU" if facts["device"] == "cuda" else where
    parts = ", ".join(f"{kind} {speedup:.2f}x" for kind, speedup in speedups.items())
    return Check(name, "ok", f"{text} on {where} (bf16: {parts}): {option}")


def _actions(device: str, threads: int) -> list[Action]:
    """Return a matrix product and a convolution, forward and backward, in fp32 or autocast bf16.

    The work per thread is constant.
    """
    import torch

    rows, images = (size * (threads if device == "cpu" else 1) for size in SIZES[device])
    layers = (
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    )
    inputs = (
        torch.randn(rows, WIDTH),
        torch.randn(images, CHANNELS, PIXELS, PIXELS).to(memory_format=torch.channels_last),
    )

    def action(layer: Any, values: Any) -> Action:
        def act(is_bf16: bool) -> None:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=is_bf16):
                out = layer(values)
            out.float().sum().backward()
            if device == "cuda":
                torch.cuda.synchronize()

        return act

    return [
        action(layer.to(device), values.to(device).requires_grad_())
        for layer, values in zip(layers, inputs, strict=True)
    ]


def _speedup(action: Action, clock: Callable[[], float]) -> float:
    """Return the median ratio of fp32's time to bf16's over rounds in which the two alternate."""
    for is_bf16 in (False, True, False, True):
        action(is_bf16)  # warm-up
    ratios: list[float] = []
    until = time.perf_counter() + SECONDS
    while len(ratios) < MOST_ROUNDS:
        if len(ratios) >= FEWEST_ROUNDS and time.perf_counter() > until:
            break
        seconds = {}
        for is_bf16 in (True, False) if len(ratios) % 2 else (False, True):
            start = clock()
            action(is_bf16)
            seconds[is_bf16] = clock() - start
        ratios.append(seconds[False] / seconds[True])
    return statistics.median(ratios)
