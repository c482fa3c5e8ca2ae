"""The emulation of a run: what replaces its components, its transfers and its all-reduces."""

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hvdtrain.config import TrainConfig
from hvdtrain.emulate.components import SCALE, Work, emulated
from hvdtrain.emulate.device import Clock, Hardware
from hvdtrain.emulate.links import DelayedCollectives, DelayedExchange
from hvdtrain.engine.session import Device
from hvdtrain.errors import UsageError
from hvdtrain.host.activity import Activity
from hvdtrain.models.component import Component
from hvdtrain.models.costs import ComponentCost
from hvdtrain.parallel.stage import DTYPES
from hvdtrain.plan.actions import COMPUTE
from hvdtrain.plan.plan import Plan
from hvdtrain.planner import clusters, profilefile
from hvdtrain.planner.adapt import seconds_to_migrate
from hvdtrain.planner.candidate import Candidate, play
from hvdtrain.planner.cost import Known, Question
from hvdtrain.planner.memory import OPTIMIZER_COPIES
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
MOST_BELOW = 2  # a smaller factor is not worth a warning


@dataclass(frozen=True)
class Emulation:
    """One rank's part of an emulation.

    Attributes:
        name: of the cluster.
        question: the model, batch and modelled machine, for predictions.
        components: of the model; they sleep.
    """

    name: str
    hardware: Hardware
    question: Question
    components: list[Component]

    @property
    def clock(self) -> Clock:
        """The dilated clock."""
        return self.hardware.clock

    def collectives(
        self, collectives: Collectives, ranks: Sequence[int], scale: float = SCALE
    ) -> Collectives:
        """Return collective operations on the modelled network."""
        return DelayedCollectives(collectives, ranks, self.hardware, scale)

    def exchange(
        self, world: World, device: torch.device, scale: float | None = None
    ) -> DelayedExchange:
        """Return transfers on the modelled links. Collective.

        Args:
            scale: modelled bytes per byte of a message, if it is another one than in training.
        """
        return DelayedExchange(world, device, self.hardware, SCALE if scale is None else scale)

    @property
    def parameters(self) -> int:
        """The number of parameters of the modelled model."""
        return sum(cost.parameters for cost in self.question.known.costs)

    def start(self, activity: Activity, plan: Callable[[], Plan]) -> Device:
        """Let events follow the steps of training, and return the modelled device.

        Args:
            activity: knows the current step.
            plan: returns the current plan.
        """
        self.hardware.step = lambda: activity.now()[0]
        self.clock.slept = 0.0  # without the planner's measurements
        rank = self.hardware.rank
        return Device(
            accelerator=f"{self.name} (emulated)",
            notice=(
                f"emulated on {self.name}: each rank sleeps for as long as a device of it would "
                f"compute, {self.clock.dilation:g} real seconds per second; losses mean nothing, "
                "nothing is evaluated"
            ),
            dilation=self.clock.dilation,
            peak_memory_bytes=lambda: round(self.predicted(plan()).rank_bytes[rank]),
        )

    def remarks(self, plan: Plan, is_chosen: bool) -> list[str]:
        """Return what a user should know before the first step.

        Args:
            is_chosen: whether the planner has chosen the plan.
        """
        dilation, enough = self.clock.dilation, self.sufficient_dilation(plan)
        remarks = []
        if enough > MOST_BELOW * dilation:
            remarks.append(
                f"--emulate-dilation {dilation:g} is low: the program itself adds about "
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

    def overhead_seconds(self, steps: int, busy_seconds: float) -> float:
        """Return the real seconds per step in which this rank neither slept nor waited.

        They do not shrink with the dilation: they are the runtime itself.

        Args:
            steps: of this process.
            busy_seconds: emulated seconds of these steps without waits.
        """
        return (self.clock.dilation * busy_seconds - self.clock.slept) / max(1, steps)

    def report(
        self, plan: Plan, step_seconds: float, overhead_seconds: float
    ) -> dict[str, object]:
        """Return the part of summary.json about the emulation."""
        return {
            "cluster": self.name,
            "dilation": self.clock.dilation,
            "step_seconds": step_seconds,
            "simulated_step_seconds": self.predicted(plan).seconds,
            "overhead_seconds_per_step": overhead_seconds,
            "remark": REMARK,
        }

    def move(self, before: Plan, after: Plan) -> None:
        """Let the seconds pass in which the weights would move to another plan."""
        self.clock.work(seconds_to_migrate(self.question, before, after))

    def predicted(self, plan: Plan) -> Candidate:
        """Return the simulated step of a plan."""
        return play(self.question, plan, "")


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
    clock = Clock(config.emulate_dilation or 1.0)
    if profilefile.is_profile(Path(config.emulate)):
        known = _measured(config, costs, recomputed, image_size, world.size)
        question = Question(known, config.batch_size, config.optimizer)
        times = known.profile.ranks[world.rank]
        hardware = Hardware(lambda step: known.network, world.rank, clock)
    else:
        cluster = clusters.load(config.emulate, world.size, "--emulate")
        question = clusters.question_of(
            cluster, costs, config.batch_size, config.optimizer, recomputed
        )
        undisturbed = replace(cluster, events=())  # the hardware adds the events of each step
        profile = undisturbed.profile(costs, OPTIMIZER_COPIES[config.optimizer])
        times = profile.ranks[world.rank]
        hardware = Hardware.of_cluster(cluster, world.rank, clock)
    itemsize = DTYPES[config.precision].itemsize

    def work(name: str) -> Work:
        return Work(times.components[name], hardware.compute)

    made = emulated(components, costs, work, itemsize)
    return Emulation(config.emulate, hardware, question, made)


def _measured(
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
    path, names = config.emulate or "", [cost.name for cost in costs]
    subjects = profilefile.subjects_of(config, costs, image_size)
    advice = "--emulate needs as many ranks as were measured, or another file"
    read = profilefile.load(Path(path), subjects, names, ranks, advice=advice)
    if isinstance(read, str):
        raise UsageError(
            f"--emulate {path} is a profile of other settings ({read}): use the same model, image "
            "size, precision and optimizer, or measure again with --plan auto --profile FILE.json"
        )
    return Known(costs, *read, recomputed)
