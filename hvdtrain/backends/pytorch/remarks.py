"""Lines to print before a run trains, which a user should know."""

import time
from typing import TYPE_CHECKING

import torch

from hvdtrain import device as devices
from hvdtrain.backends.pytorch.agreement import agreement_remarks
from hvdtrain.check.verify import Trial
from hvdtrain.emulate.world import emulation_of
from hvdtrain.options.syncrequest import Server
from hvdtrain.parallel.stage import AUTOCAST
from hvdtrain.plan.plan import Plan
from hvdtrain.sync import engine

if TYPE_CHECKING:
    from hvdtrain.planner.choose import Choice

# PyTorch computes without oneDNN where a processor lacks AVX-512: bf16 is 20 to 60x slower.
SLOW = 3.0  # ratio of the times of bf16 and fp32 from which on a line says so
# Small enough for one thread: others may wait for a core. 20 ms in all in bf16 without AVX-512.
WIDTH, REPEATS = 96, 20


def remarks_of(
    trial: Trial, plan: Plan, chosen: "Choice | None", verified: str
) -> tuple[str, ...]:
    """Return what a user should know of the session before it trains. Collective."""
    config, world = trial.config, trial.world
    has_sums = not isinstance(config.sync_request, Server)
    sums = engine.remarks(config.reduce_with, world) if has_sums else []
    choice = chosen.remarks if chosen else ()
    if (emulation := emulation_of(world)) is not None:
        choice = (*emulation.remarks(plan, chosen is not None), *choice)
    slow = (
        "" if emulation or world.rank else precision_remark(config.precision, trial.images.device)
    )
    return (*sums, *agreement_remarks(config, plan), *choice, *filter(None, [verified, slow]))


def precision_remark(precision: str, device: torch.device) -> str:
    """Return a line if bf16 or fp16 is much slower than fp32 on this processor, else nothing."""
    if precision not in AUTOCAST or devices.is_gpu(device):
        return ""
    ratio = _seconds(AUTOCAST[precision]) / _seconds(torch.float32)
    if ratio < SLOW:
        return ""
    return (
        f"{precision} takes {ratio:.0f}x the time of fp32 for a product of matrices on this "
        "processor: --precision fp32 is faster here"
    )


def _seconds(dtype: torch.dtype) -> float:
    """Return the shortest of several times of a product of two matrices.

    Processor time of this thread: others may be busy on its core.
    """
    left, right = torch.ones(2, WIDTH, WIDTH, dtype=dtype)
    times = []
    for _ in range(REPEATS):
        started = time.thread_time()
        torch.matmul(left, right)
        times.append(time.thread_time() - started)
    return min(times)
