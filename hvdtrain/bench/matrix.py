"""The rate at which this rank multiplies matrices: what no step can exceed."""

import time

import torch

from hvdtrain.parallel.stage import DTYPES

SIZES = {"cpu": 2048, "cuda": 8192}
SECONDS = 1.0


def matrix_rate(device: torch.device, precision: str) -> float:
    """Operations a second of a square product, a multiply-add as two: the best of a second's."""
    dtype = torch.bfloat16 if precision == "bf16" else DTYPES[precision]
    size = SIZES[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    best = _seconds(left, right, out)  # not the only one, unless one takes all the time
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        best = min(best, _seconds(left, right, out))
    return 2 * size**3 / best


def _seconds(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    if left.device.type == "cuda":
        torch.cuda.synchronize(left.device)
    began = time.perf_counter()
    torch.mm(left, right, out=out)
    if left.device.type == "cuda":
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - began
