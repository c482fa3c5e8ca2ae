"""The parts of a step on a GPU add up to the step, though the host is done with it earlier."""

import pytest
import torch

from hvdtrain import device as devices
from tests.single.parallel.test_deferred import runtime_of, step_of


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parts_of_a_step_sum_to_its_duration(device: str, precision: str) -> None:
    runtime = runtime_of(device, precision=precision, optimizer="adamw")
    runtime.train(step_of(runtime, 0))  # allocates
    where = torch.device(device)
    start = devices.mark(where)
    step = runtime.train(step_of(runtime, 1))
    end = devices.mark(where)
    devices.synchronize(where)
    seconds = step.marks.seconds()
    parts = sum(seconds.spent.values()) + seconds.exposed + seconds.bubble + seconds.transfer
    assert min(seconds.spent["F"], seconds.spent["B"]) > 0
    # On a CPU other processes may run between two actions.
    assert parts == pytest.approx(end - start, rel=0.05 if device == "cuda" else 0.5)
    runtime.observer.close()
