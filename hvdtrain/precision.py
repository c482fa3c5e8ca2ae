"""The speed-up of bf16 over fp32, measured on a device until it is stable."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

EQUAL = 1.1  # a smaller difference is not worth a choice
MOST_ROUNDS, FEWEST_ROUNDS = 30, 5
SPREAD = 0.1  # of the middle half of the rounds, relative to their median, where it is stable
KINDS = ("matrices", "convolutions")
# Rows and width of the matrices, images and channels of the convolution: per thread of a CPU, and
# per GPU, which takes longer for these than for the launches of its kernels.
CPU_SIZES, GPU_SIZES = (256, 512, 8, 64), (8192, 4096, 512, 256)
PIXELS = 16

Action = Callable[[bool], object]


def bf16_speedups(device: Any, threads: int) -> dict[str, Any]:
    """Measure bf16 against fp32 on a device; random numbers stay as they are.

    Args:
        threads: that PyTorch uses on a CPU.

    Returns:
        `is_gpu`, `threads`, and `speedups` by kind of work: in time on a GPU, else in processor
        time.
    """
    import torch

    from hvdtrain import device as devices

    is_gpu = devices.is_gpu(device)
    with torch.random.fork_rng(devices.generators(device)):
        actions = zip(KINDS, _actions(device, threads), strict=True)
    clock = time.perf_counter if is_gpu else time.process_time
    speedups = {kind: speedup(action, clock) for kind, action in actions}
    return {"is_gpu": is_gpu, "threads": threads, "speedups": speedups}


def comparison(facts: Mapping[str, Any]) -> tuple[str, str]:
    """Return the precision that is faster, empty if it does not matter, and why, in words.

    Args:
        facts: result of `bf16_speedups`.
    """
    ratio = statistics.geometric_mean(facts["speedups"].values())
    unit = "time" if facts["is_gpu"] else "processor time"
    if 1 / EQUAL <= ratio <= EQUAL:
        faster, text = "", "bf16 and fp32 are about equally fast"
    elif ratio > 1:
        faster, text = "bf16", f"fp32 takes {ratio:.1f}x the {unit} of bf16"
    else:
        faster, text = "fp32", f"bf16 takes {1 / ratio:.1f}x the {unit} of fp32"
    where = f"{facts['threads']} thread{'s' if facts['threads'] > 1 else ''}"
    where = "the GPU" if facts["is_gpu"] else where
    parts = ", ".join(f"{kind} {value:.2f}x" for kind, value in facts["speedups"].items())
    return faster, f"{text} on {where} (bf16: {parts})"


def speedup(action: Action, clock: Callable[[], float]) -> float:
    """Return the median ratio of fp32's time to bf16's over rounds in which the two alternate.

    Args:
        action: works in bf16 if its argument is True, else in fp32.
    """
    for is_bf16 in (False, True, False, True):
        action(is_bf16)  # warm-up
    ratios: list[float] = []
    while len(ratios) < MOST_ROUNDS and not _is_stable(ratios):
        seconds = {}
        for is_bf16 in (True, False) if len(ratios) % 2 else (False, True):
            start = clock()
            action(is_bf16)
            seconds[is_bf16] = clock() - start
        ratios.append(seconds[False] / seconds[True])
    return statistics.median(ratios)


def _is_stable(ratios: list[float]) -> bool:
    if len(ratios) < FEWEST_ROUNDS:
        return False
    lower, median, upper = statistics.quantiles(ratios, n=4)
    return upper - lower <= SPREAD * median


def _actions(device: Any, threads: int) -> list[Action]:
    """Return a matrix product and a convolution, forward and backward, in fp32 or autocast bf16.

    The work per thread is constant.
    """
    import torch

    from hvdtrain import device as devices

    is_gpu = devices.is_gpu(device)
    rows, width, images, channels = GPU_SIZES if is_gpu else CPU_SIZES
    times = 1 if is_gpu else threads
    layers = (
        torch.nn.Linear(width, width),
        torch.nn.Conv2d(channels, channels, 3, padding=1).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    )
    pixels = torch.randn(images * times, channels, PIXELS, PIXELS)
    inputs = (torch.randn(rows * times, width), pixels.to(memory_format=torch.channels_last))

    def action(layer: Any, values: Any) -> Action:
        def act(is_bf16: bool) -> None:
            with devices.autocast(device, torch.bfloat16 if is_bf16 else None):
                out = layer(values)
            out.float().sum().backward()
            devices.synchronize(device)

        return act

    return [
        action(layer.to(device), values.to(device).requires_grad_())
        for layer, values in zip(layers, inputs, strict=True)
    ]
