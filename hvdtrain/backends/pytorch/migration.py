"""Migration of a run to another plan."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from hvdtrain.backends.pytorch.batches import check_batches, input_boundaries
from hvdtrain.backends.pytorch.build import build_runtime
from hvdtrain.backends.pytorch.session import Times, TorchFaults
from hvdtrain.backends.pytorch.state import TorchState, named_state, put_arrays, to_array
from hvdtrain.checkpoint.store import EXTRA
from hvdtrain.config import TrainConfig
from hvdtrain.data.shards import Index
from hvdtrain.engine.machine import machine_of
from hvdtrain.engine.session import Migration, StepTimes
from hvdtrain.models import extrastate
from hvdtrain.models.component import Component
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.parallel.stage import Part
from hvdtrain.plan.plan import Plan, is_same_layout, moves
from hvdtrain.world import World

MOVE_TAG = 1000  # and above


@dataclass(kw_only=True)
class TorchMigration(Migration):
    """The migration of a run in PyTorch.

    Attributes:
        epoch_length: number of training samples.
    """

    state: TorchState
    times: Times
    faults: TorchFaults
    components: Sequence[Component]
    index: Index
    epoch_length: int

    @override
    def check(self, plan: Plan) -> None:
        config, size, form = self.state.config, self.index.image_shape[0], self.index.target_form
        boundaries = input_boundaries(self.components, config, size, form)
        check_batches(config, plan, self.components, boundaries, self.epoch_length)

    @override
    def change(self, plan: Plan) -> None:
        state = self.state
        if not is_same_layout(state.plan, plan):
            state.counted_before = state.counted()
            state.runtime = under_plan(
                state.runtime,
                state.config,
                state.plan,
                plan,
                self.components,
                self.index.image_shape[0],
                state.world,
            )
            self.faults.renew()
            machine_of(state.world).migrated(state.plan, plan)
        state.plan = plan

    @override
    def read_times(self) -> StepTimes:
        return self.times.read()


def under_plan(
    runtime: Runtime,
    config: TrainConfig,
    before: Plan,
    after: Plan,
    components: Sequence[Component],
    image_size: int,
    world: World,
) -> Runtime:
    """Return the interpreter of another plan with the same training state. Collective.

    The state is weights, running statistics and optimizer. Each rank receives what it needs as
    arrays, named as in a checkpoint, and loads them as it would load a checkpoint.
    """
    arrays = state_under(before, after, runtime.parts, world)
    migrated = build_runtime(
        config, after, components, runtime.settings.images, image_size, world, before=runtime
    )
    put_arrays(migrated.parts, arrays)
    # The table `do` refers to methods of the old runtime: this cycle would keep the runtime and
    # its weights in memory until the collector runs.
    runtime.do, runtime.parts = {}, {}
    gc.collect()
    return migrated


def state_under(
    before: Plan, after: Plan, parts: Mapping[int, Part], world: World
) -> dict[str, np.ndarray]:
    """Return the state that this rank needs under another plan, from all ranks. Collective.

    It has the form of a checkpoint. Arrays that the rank holds already share the memory of its
    tensors.
    """
    held = _by_component(parts)
    planned, sending = moves(before, after), []
    needed: dict[str, np.ndarray] = {}
    for number, move in enumerate(planned):
        if move.sender == world.rank:
            sending.append(world.send(held[move.component], move.receiver, MOVE_TAG + number))
    for number, move in enumerate(planned):
        if move.receiver == world.rank:
            needed |= world.receive(move.sender, MOVE_TAG + number)
    for wait in sending:
        wait()
    for stage in after.stages:
        if world.rank in stage.ranks:
            for component in stage.components:
                needed |= held.get(component, {})
    return needed


def _by_component(parts: Mapping[int, Part]) -> dict[str, dict[str, np.ndarray]]:
    """Return the state of each component that this rank holds, named as in a checkpoint."""
    held: dict[str, dict[str, np.ndarray]] = {}
    for part in parts.values():
        named = named_state(part, part.model.tensors().keys())
        for component, module in part.model.components.items():
            tensors = {
                key: tensor
                for name, _ in (*module.named_parameters(), *module.named_buffers())
                for key, tensor in named[f"{component}.{name}"].items()
            }
            extra = extrastate.saved(module, f"{component}.")
            tensors |= {f"{EXTRA}{name}": tensor for name, tensor in extra.items()}
            held[component] = {
                key: to_array(tensor.detach().cpu()) for key, tensor in tensors.items()
            }
    return held
