"""Steps on a GPU, for which the host does not wait: it reads their results later."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hvdtrain.parallel.runtime import read_later
from tests.single.parallel.test_deferred import runtime_of, step_of


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Let PyTorch raise an error where the host waits for the GPU."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_no_operation_of_a_step_synchronises(
    device: str, precision: str, clip_norm: float | None
) -> None:
    runtime = runtime_of(device, precision=precision, clip_norm=clip_norm, optimizer="adamw")
    runtime.train(step_of(runtime, 0))  # allocates
    step = step_of(runtime, 1)
    with no_waiting(device):
        read = read_later(runtime.train(step), runtime.device)
    assert read()[0] > 0
    runtime.observer.close()
