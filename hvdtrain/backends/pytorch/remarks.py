"""Lines to print before a run trains, which a user should know."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hvdtrain import device as devices
from hvdtrain.backends.pytorch.agreement import agreement_remarks
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Index
from hvdtrain.data.order import Rows
from hvdtrain.data.shards import Samples
from hvdtrain.engine.feed import Normalisation
from hvdtrain.engine.machine import machine_of
from hvdtrain.models.component import Component
from hvdtrain.options.requests import Server
from hvdtrain.options.sections import AUTO_PRECISION
from hvdtrain.parallel.stage import AUTOCAST, Images
from hvdtrain.plan.plan import Plan
from hvdtrain.precision import bf16_speedups, comparison, speedup
from hvdtrain.sync import groups
from hvdtrain.world import World

if TYPE_CHECKING:
    from hvdtrain.planner.choose import Choice

# PyTorch computes without oneDNN where a processor lacks AVX-512: bf16 is 20 to 60x slower.
SLOW = 3.0  # ratio of the times of bf16 and fp32 from which on a line says so
WIDTH = 96  # of the matrices, small enough for one thread: others may wait for a core


@dataclass(frozen=True)
class Trial:
    """The model, data and settings that a run will train with."""

    config: TrainConfig
    components: Sequence[Component]
    index: Index
    splits: Mapping[str, Samples]
    rows: Rows
    normalisation: Normalisation
    images: Images
    world: World


def remarks_of(
    trial: Trial, plan: Plan, chosen: "Choice | None", verified: str
) -> tuple[str, ...]:
    """Return what a user should know of the session before it trains. Collective."""
    config, world = trial.config, trial.world
    has_sums = not isinstance(config.sync_request, Server)
    sums = groups.remarks(config.reduce_with, world) if has_sums else []
    machine = machine_of(world)
    choice = (*machine.remarks(plan, chosen is not None), *(chosen.remarks if chosen else ()))
    slow = ""
    if world.rank == 0 and not machine.is_modelled:
        slow = precision_remark(config.precision, trial.images.device)
    return (*sums, *agreement_remarks(config, plan), *choice, *filter(None, [verified, slow]))


def precision_remark(precision: str, device: torch.device) -> str:
    """Return a line if bf16 or fp16 is much slower than fp32 on this processor, else nothing."""
    if precision not in AUTOCAST or devices.is_gpu(device):
        return ""
    # Processor time of this thread: others may be busy on its core.
    factors = [
        torch.ones(2, WIDTH, WIDTH, dtype=dtype) for dtype in (torch.float32, AUTOCAST[precision])
    ]
    ratio = 1 / speedup(lambda is_half: torch.matmul(*factors[is_half]), time.thread_time)
    if ratio < SLOW:
        return ""
    return (
        f"{precision} takes {ratio:.0f}x the time of fp32 for a product of matrices on this "
        "processor: --precision fp32 is faster here"
    )


def chosen_precision(config: TrainConfig, world: World) -> tuple[TrainConfig, str]:
    """Return the configuration with what rank 0 measures to be faster, and a line. Collective.

    Nothing is measured, and the line is empty, unless the precision is "auto".
    """
    if config.precision != AUTO_PRECISION:
        return config, ""
    device, chosen = devices.choose_device(config.device, world), None
    if world.rank == 0:
        torch.set_num_threads(1)  # waiting threads would use processor time
        faster, words = comparison(bf16_speedups(device, 1))
        torch.set_num_threads(world.threads)
        chosen = faster or "fp32", words
    precision, words = world.broadcast(chosen)
    line = f"--precision {AUTO_PRECISION}: {precision}, since {words}"
    return replace(config, precision=precision), line
