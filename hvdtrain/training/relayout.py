"""From one plan to another between two steps, without a checkpoint: state moves in memory."""

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
    here: World,
) -> Runtime:
    """The interpreter of another plan with the same weights, statistics and optimizer. Collective.

    What a rank needs comes to it as a checkpoint's arrays would, and is put where they are.
    """
    found = layout.state_under(before, after, runtime.parts, here)
    made = build_runtime(
        config, after, components, runtime.images, image_size, here, before=runtime
    )
    state, optimizer = store.by_kind(
        {name: tensors.to_tensor(array) for name, array in found.items()}
    )
    layout.put_state(made.parts, state, optimizer)
    made.events = runtime.events
    # Its methods, in a table of its own, would keep it and its weights until the collector runs.
    runtime.do, runtime.parts = {}, {}
    gc.collect()
    return made
