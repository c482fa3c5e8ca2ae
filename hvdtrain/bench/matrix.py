"""Measures the rate at which this rank multiplies matrices: an upper limit for every step."""

import time

import torch

from hvdtrain.parallel.stage import DTYPES

SIZES = {"cpu": 2048, "cuda": 8192}
SMALLEST = 256
SECONDS = 1.0


def matrix_rate(device: torch.device, precision: str) -> float:
    """Return the operations per second of a square product, with 2 per multiply-add.

    It is the best rate within SECONDS. The matrices grow until the rate no longer depends on their
    size, unless a product takes too long before that: CPUs without bf16 instructions need minutes
    for a large one.
    """
    dtype = torch.bfloat16 if precision == "bf16" else DTYPES[precision]
    size, best = SMALLEST, 0.0
    until = time.perf_counter() + SECONDS
    while True:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        took = min(_seconds(left, right, out) for _ in range(2))  # the first one prepares kernels
        while time.perf_counter() < until and size == SIZES[device.type]:
            took = min(took, _seconds(left, right, out))
        best = max(best, 2 * size**3 / took)
        if size == SIZES[device.type] or time.perf_counter() + 16 * took > until:
            return best
        size *= 2


def _seconds(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    if left.device.type == "cuda":
        torch.cuda.synchronize(left.device)
    began = time.perf_counter()
    torch.mm(left, right, out=out)
    if left.device.type == "cuda":
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - began
