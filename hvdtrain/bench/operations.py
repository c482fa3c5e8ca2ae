"""The seconds that PyTorch's operations take in a step on a CPU, from PyTorch's profiler."""

from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile

from hvdtrain.device import is_gpu
from hvdtrain.host.output import PROFILER_REMARKS, without


def operation_seconds(
    step: Callable[[], object], steps: int, device: torch.device
) -> dict[str, float]:
    """Run steps under the profiler, and return the seconds per step of each operation.

    An operation has the time of its calls without the operations that they call. On a GPU the
    steps run, too, and nothing is returned: there an operation on the host only starts work.
    """
    if is_gpu(device):
        for _ in range(steps):
            step()
        return {}
    with without(PROFILER_REMARKS), profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            step()
    return {
        event.key.removeprefix("aten::"): event.self_cpu_time_total / 1e6 / steps
        for event in profiled.key_averages()
    }


def mean_over_ranks(seconds: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the mean seconds of each operation, longest first."""
    by_rank = list(seconds)
    names = {name for times in by_rank for name in times}
    means = {name: sum(times.get(name, 0.0) for times in by_rank) / len(by_rank) for name in names}
    return dict(sorted(means.items(), key=lambda item: -item[1]))
