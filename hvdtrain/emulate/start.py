"""The start of an emulated run, and the planner's measurements in it.

Their payload is small, whatever size is measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Index
from hvdtrain.emulate.device import Flight
from hvdtrain.emulate.emulation import Emulation, emulation
from hvdtrain.emulate.world import emulated, emulation_of
from hvdtrain.models.component import Component
from hvdtrain.models.costs import component_costs
from hvdtrain.options.planrequest import Chosen
from hvdtrain.parallel.stage import AUTOCAST, DTYPES
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.recompute import recomputed_components
from hvdtrain.planner.probe import Start, Tools, multiplying
from hvdtrain.world import World

WORK_SECONDS = 20e-6  # emulated seconds of the computation that measures contention


def tools_of(start: Start, world: World, device: torch.device) -> Tools:
    """Return the planner's tools, which are delayed under an emulation.

    Args:
        start: starts the all-reduces of training.
        device: of the gradients that it sums.
    """
    emulation = emulation_of(world)
    if emulation is None:
        return Tools(start, work=multiplying(device), device=device)

    def group_sum(communicator: Any) -> Start:
        return delayed(emulation, _blocking(communicator), range(communicator.size))

    work = partial(emulation.hardware.compute, WORK_SECONDS)
    return Tools(delayed(emulation, start, range(world.size)), group_sum, work)


def _blocking(communicator: Any) -> Start:
    """Return a function that runs MPI's blocking all-reduce in place."""

    def start(tensor: torch.Tensor, _: str) -> Callable[[], bool]:
        total = np.empty_like(tensor.numpy())
        communicator.Allreduce(tensor.numpy(), total)
        tensor.copy_(torch.from_numpy(total))
        return lambda: True

    return start


def delayed(emulation: Emulation, start: Start, ranks: Sequence[int]) -> Start:
    """Return all-reduces that end when those of the modelled network would.

    Args:
        start: starts the real ones.
        ranks: the members.
    """
    hardware, clock = emulation.hardware, emulation.clock

    def begin(tensor: torch.Tensor, name: str) -> Callable[[], bool]:
        stamps = torch.zeros(len(ranks), dtype=torch.float64)
        stamps[hardware.rank], computed = clock.now(), clock.slept
        seconds = hardware.reduce_seconds(ranks, tensor.nbytes)
        flight = Flight(float(stamps[hardware.rank]), seconds)
        hardware.flights.append(flight)
        is_summed, end = start(stamps, name), None

        def is_over() -> bool:
            nonlocal end
            if end is None and is_summed():
                end = float(stamps.max()) + seconds
            _, reduce = hardware.network.contention
            overlap = min(clock.slept - computed, seconds * reduce)
            if end is None or clock.now() < end + overlap * (1 - 1 / reduce):
                return False
            hardware.flights.remove(flight)
            return True

        return is_over

    return begin


def emulate(
    config: TrainConfig,
    components: Sequence[Component],
    index: Index,
    world: World,
    plan_of: Callable[[Sequence[Component]], Plan],
) -> tuple[TrainConfig, list[Component], World]:
    """Return the configuration, components and world of an emulated run. Collective.

    Nothing is evaluated: accuracies would mean nothing.

    Args:
        plan_of: returns the plan of the run for these components, if none will be chosen.

    Raises:
        UsageError: if the cluster is not valid, or the plan does not fit.
    """
    size, names = index.image_shape[0], [part.name for part in components]
    costs = component_costs(
        components,
        size,
        dtype=DTYPES[config.precision],
        autocast="cpu" if config.precision in AUTOCAST else None,
    )
    recomputed = recomputed_components(config.recompute, names)
    made = emulation(config, components, costs, recomputed, size, world)
    if config.emulate_dilation is None:
        dilation = 0.0
        if world.rank == 0:
            is_chosen = isinstance(config.plan_request, Chosen)
            plan = None if is_chosen else plan_of(made.components)
            dilation = made.sufficient_dilation(plan)
        made.clock.dilation = world.broadcast(dilation)
    return replace(config, eval_every=0, device="cpu"), made.components, emulated(world, made)
