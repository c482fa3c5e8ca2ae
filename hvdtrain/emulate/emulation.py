"""The emulation of a run: what replaces its components, its transfers and its all-reduces.

The planner's measurements send small payloads, whatever size they measure.
"""

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Index
from hvdtrain.emulate.components import SCALE, Work, emulated
from hvdtrain.emulate.device import (
    Clock,
    DelayedCollectives,
    DelayedExchange,
    Flight,
    Hardware,
)
from hvdtrain.engine.machine import Machine
from hvdtrain.engine.session import Device
from hvdtrain.errors import UsageError
from hvdtrain.host.activity import Activity
from hvdtrain.models.component import Component
from hvdtrain.models.costs import ComponentCost, component_costs
from hvdtrain.options.requests import Chosen
from hvdtrain.options.sections import parse_emulate
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.stage import AUTOCAST, DTYPES
from hvdtrain.plan.cut import COMPUTE
from hvdtrain.plan.plan import Plan, recomputed_components
from hvdtrain.planner import clusters, profilefile
from hvdtrain.planner.adapt import seconds_to_migrate
from hvdtrain.planner.candidate import Candidate, play
from hvdtrain.planner.cost import Known, Question
from hvdtrain.planner.memory import optimizer_copies
from hvdtrain.planner.probe import Start, Tools
from hvdtrain.planner.solve import lower_bound
from hvdtrain.sync.collectives import Collectives
from hvdtrain.world import World

REMARK = (
    "Seconds and images per second are those of the modelled cluster; peak memory is predicted; "
    "losses and weights mean nothing. Real: startup_seconds, and overhead_seconds_per_step, in "
    "which a rank neither slept nor waited since the last start."
)
# Seconds of the runtime itself, by measurement: per step, and on each core for every rank that
# shares it, per step, and per action and per component in it.
STEP_SECONDS, SHARED_STEP_SECONDS, ACTION_SECONDS = 12e-3, 2e-3, 0.15e-3
OVERHEAD = 0.03  # part of a dilated step that the runtime itself may take
WORK_SECONDS = 20e-6  # emulated seconds of the computation that measures contention
MOST_BELOW = 2  # a smaller factor is not worth a warning


@dataclass(frozen=True)
class Emulation(Machine):
    """One rank's part of an emulation.

    Attributes:
        name: of the cluster.
        question: the model, batch and modelled machine, for predictions.
        components: of the model; they sleep.
    """

    is_modelled = True
    name: str
    hardware: Hardware
    question: Question
    components: list[Component]

    @property
    def clock(self) -> Clock:
        """The dilated clock."""
        return self.hardware.clock

    @override
    def exchange(self, world: World, device: torch.device) -> Exchange:
        return DelayedExchange(world, device, self.hardware, SCALE)

    @override
    def whole_exchange(self, world: World, device: torch.device) -> Exchange:
        return DelayedExchange(world, device, self.hardware, 1.0)

    @override
    def collectives(self, collectives: Collectives, ranks: Sequence[int]) -> Collectives:
        return DelayedCollectives(collectives, ranks, self.hardware, SCALE)

    @override
    def tools(self, start: Start, world: World, device: torch.device) -> Tools:
        def group_sum(communicator: Any) -> Start:
            return self._delayed(_blocking(communicator), range(communicator.size))

        work = partial(self.hardware.compute, WORK_SECONDS)
        return Tools(self._delayed(start, range(world.size)), group_sum, work)

    def _delayed(self, start: Start, ranks: Sequence[int]) -> Start:
        """Return all-reduces that end when those of the modelled network would.

        Args:
            start: starts the real ones.
            ranks: the members.
        """
        hardware, clock = self.hardware, self.clock

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

    @override
    def parameters(self, components: Sequence[Component]) -> int:
        return sum(cost.parameters for cost in self.question.known.costs)

    @override
    def device(
        self, device: torch.device, world: World, activity: Activity, plan: Callable[[], Plan]
    ) -> Device:
        self.hardware.step = lambda: activity.now()[0]  # events follow the steps from now on
        self.clock.slept = 0.0  # without the planner's measurements
        rank = self.hardware.rank

        def report(step_seconds: float, steps: int, busy_seconds: float) -> dict[str, Any]:
            # The runtime itself takes real seconds, which do not shrink with the dilation.
            overhead = (self.clock.dilation * busy_seconds - self.clock.slept) / max(1, steps)
            return {
                "emulated": {
                    "cluster": self.name,
                    "dilation": self.clock.dilation,
                    "step_seconds": step_seconds,
                    "simulated_step_seconds": self.predicted(plan()).seconds,
                    "overhead_seconds_per_step": float(np.mean(world.gather(overhead))),
                    "remark": REMARK,
                }
            }

        return Device(
            accelerator=f"{self.name} (emulated)",
            notice=(
                f"emulated on {self.name}: each rank sleeps for as long as a device of it would "
                f"compute, {self.clock.dilation:g} real seconds per second; losses mean nothing, "
                "nothing is evaluated"
            ),
            dilation=self.clock.dilation,
            peak_memory_bytes=lambda: round(self.predicted(plan()).rank_bytes[rank]),
            report=report,
        )

    @override
    def remarks(self, plan: Plan, is_chosen: bool) -> list[str]:
        dilation, enough = self.clock.dilation, self.sufficient_dilation(plan)
        remarks = []
        if enough > MOST_BELOW * dilation:
            remarks.append(
                f"--emulate {self.name}:{dilation:g} is too fast: the program itself adds about "
                f"{OVERHEAD * enough / dilation:.0%} to a step, so that reported seconds are too "
                f"long; with {enough:g} it adds {OVERHEAD:.0%}"
            )
        if is_chosen:
            remarks.append(
                f"the planner measures and prints real seconds, {dilation:g} per emulated one"
            )
        return remarks

    def sufficient_dilation(self, plan: Plan | None) -> float:
        """Return a dilation that makes the runtime's overhead a small part of a step.

        Args:
            plan: of the run; None if it will be chosen.
        """
        ranks = self.question.ranks
        if plan is None:
            seconds = lower_bound(self.question)
            actions = 8 * ranks + 2 * len(self.components)
        else:
            candidate = self.predicted(plan)
            seconds = candidate.seconds
            actions = max(
                len(done)
                + sum(len(plan.stages[a.stage].components) for a in done if a.kind in COMPUTE)
                for done in candidate.schedule.values()
            )
        sharing = max(1.0, ranks / len(os.sched_getaffinity(0)))
        overhead = STEP_SECONDS + sharing * (SHARED_STEP_SECONDS + ACTION_SECONDS * actions)
        return max(1.0, float(math.ceil(overhead / (OVERHEAD * seconds))))

    @override
    def migrated(self, before: Plan, after: Plan) -> None:
        self.clock.work(seconds_to_migrate(self.question, before, after))

    def predicted(self, plan: Plan) -> Candidate:
        """Return the simulated step of a plan."""
        return play(self.question, plan, "")


def _blocking(communicator: Any) -> Start:
    """Return a function that runs MPI's blocking all-reduce in place."""

    def start(tensor: torch.Tensor, _: str) -> Callable[[], bool]:
        total = np.empty_like(tensor.numpy())
        communicator.Allreduce(tensor.numpy(), total)
        tensor.copy_(torch.from_numpy(total))
        return lambda: True

    return start


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
    assert config.emulate is not None
    if parse_emulate(config.emulate)[1] is None:
        dilation = 0.0
        if world.rank == 0:
            is_chosen = isinstance(config.plan_request, Chosen)
            plan = None if is_chosen else plan_of(made.components)
            dilation = made.sufficient_dilation(plan)
        made.clock.dilation = world.broadcast(dilation)
    config = replace(config, eval_every=0, device="cpu")
    return config, made.components, replace(world, machine=made)


def emulation(
    config: TrainConfig,
    components: Sequence[Component],
    costs: Sequence[ComponentCost],
    recomputed: Collection[str],
    image_size: int,
    world: World,
) -> Emulation:
    """Return the emulation of a run.

    Args:
        components, costs: of the real model.
        recomputed: names of the components that are recomputed in backward.
        image_size: height and width of the images in pixels.

    Raises:
        UsageError: if the ranks are on several hosts, whose clocks cannot be compared, or the
            cluster or the profile is not valid.
    """
    assert config.emulate is not None
    if world.local_size < world.size:
        raise UsageError(
            f"--emulate runs on one host, and these {world.size} ranks are on several: use --ranks"
        )
    name, dilation = parse_emulate(config.emulate)
    clock = Clock(dilation or 1.0)
    if profilefile.is_profile(Path(name)):
        known = _measured(name, config, costs, recomputed, image_size, world.size)
        question = Question(known, config.batch_size, config.optimizer)
        times = known.profile.ranks[world.rank]
        hardware = Hardware(lambda step: known.network, world.rank, clock)
    else:
        cluster = clusters.load(name, world.size, "--emulate")
        question = clusters.question_of(
            cluster, costs, config.batch_size, config.optimizer, recomputed
        )
        undisturbed = replace(cluster, events=())  # the hardware adds the events of each step
        profile = undisturbed.profile(costs, optimizer_copies(config.optimizer))
        times = profile.ranks[world.rank]
        hardware = Hardware.of_cluster(cluster, world.rank, clock)
    itemsize = DTYPES[config.precision].itemsize

    def work(name: str) -> Work:
        return Work(times.components[name], hardware.compute)

    made = emulated(components, costs, work, itemsize)
    return Emulation(name, hardware, question, made)


def _measured(
    path: str,
    config: TrainConfig,
    costs: Sequence[ComponentCost],
    recomputed: Collection[str],
    image_size: int,
    ranks: int,
) -> Known:
    """Return what a profile file knows of the ranks that it was measured on.

    Raises:
        UsageError: if it is not valid, or of another model.
    """
    names = [cost.name for cost in costs]
    subjects = profilefile.subjects_of(config, costs, image_size)
    advice = "--emulate needs as many ranks as were measured, or another file"
    read = profilefile.load(Path(path), subjects, names, ranks, advice=advice)
    if isinstance(read, str):
        raise UsageError(
            f"--emulate {path} is a profile of other settings ({read}): use the same model, image "
            "size, precision and optimizer, or measure again with --plan auto --profile FILE.json"
        )
    return Known(costs, *read, recomputed)
