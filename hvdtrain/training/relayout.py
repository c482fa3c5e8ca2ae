"""Migration to another plan between two steps: state moves in memory, without a checkpoint."""

import gc
from collections.abc import Sequence

from hvdtrain.config import TrainConfig
from hvdtrain.models.component import Component
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.training import layout, tensors
from hvdtrain.training.build import build_runtime
from hvdtrain.training.checkpoint import store
from hvdtrain.world import World


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
    arrays = layout.state_under(before, after, runtime.parts, world)
    migrated = build_runtime(
        config, after, components, runtime.images, image_size, world, before=runtime
    )
    state, optimizer = store.by_kind(
        {name: tensors.to_tensor(array) for name, array in arrays.items()}
    )
    layout.put_state(migrated.parts, state, optimizer)
    migrated.events = runtime.events
    # The table `do` refers to methods of the old runtime: this cycle would keep the runtime and
    # its weights in memory until the collector runs.
    runtime.do, runtime.parts = {}, {}
    gc.collect()
    return migrated
