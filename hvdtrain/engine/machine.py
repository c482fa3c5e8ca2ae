"""The devices and links of a run: those of this computer, or of a subclass that models others."""

from collections.abc import Callable, Sequence

import torch

from hvdtrain import device as devices
from hvdtrain.engine.session import Device
from hvdtrain.host.activity import Activity
from hvdtrain.models.component import Component, parameter_count
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.plan.plan import Plan
from hvdtrain.planner.probe import Start, Tools, multiplying
from hvdtrain.sync.collectives import Collectives
from hvdtrain.world import World


class Machine:
    """The devices and links of this computer.

    Attributes:
        is_modelled: whether its devices are not here, so that components compute nothing.
    """

    is_modelled = False

    def exchange(self, world: World, device: torch.device) -> Exchange:
        """Return the transfers of a run with several ranks. Collective."""
        assert world.communicator is not None, "a single rank transfers nothing"
        return Exchange(world.communicator, device)

    def whole_exchange(self, world: World, device: torch.device) -> Exchange:
        """Return transfers whose messages have the bytes of the real model. Collective."""
        return self.exchange(world, device)

    def collectives(self, collectives: Collectives, ranks: Sequence[int]) -> Collectives:
        """Return the collective operations of ranks, given those of a library."""
        return collectives

    def tools(self, start: Start, world: World, device: torch.device) -> Tools:
        """Return the operations whose times the planner measures.

        Args:
            start: starts the all-reduces of training.
            device: of the gradients that it sums.
        """
        return Tools(start, work=multiplying(device), device=device)

    def parameters(self, components: Sequence[Component]) -> int:
        """Return the number of parameters of a model."""
        return parameter_count(components)

    def device(
        self, device: torch.device, world: World, activity: Activity, plan: Callable[[], Plan]
    ) -> Device:
        """Return the description of this rank's device, when training starts.

        Args:
            activity: knows the current step.
            plan: returns the current plan.
        """
        loss_delay = int(devices.is_queued(device))
        if not devices.is_gpu(device):
            return Device(loss_delay=loss_delay)
        return Device(
            kind="cuda",
            accelerator=devices.gpu_name(device),
            loss_delay=loss_delay,
            memory_bytes=lambda: float(devices.allocated_bytes(device)),
            peak_memory_bytes=lambda: devices.peak_bytes(device),
        )

    def remarks(self, plan: Plan, is_chosen: bool) -> list[str]:
        """Return what a user should know before the first step.

        Args:
            is_chosen: whether the planner has chosen the plan.
        """
        return []

    def migrated(self, before: Plan, after: Plan) -> None:
        """Let the time pass, beyond the real one, in which weights move to another plan."""


THIS = Machine()


def machine_of(world: World) -> Machine:
    """Return the machine of a run."""
    machine: Machine = world.machine or THIS
    return machine
