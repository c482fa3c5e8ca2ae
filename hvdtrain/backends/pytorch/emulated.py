"""The start of an emulated run: components that sleep, on ranks with a dilated clock."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Index
from hvdtrain.emulate.emulation import emulation
from hvdtrain.emulate.world import emulated
from hvdtrain.models.component import Component
from hvdtrain.models.costs import component_costs
from hvdtrain.options.planrequest import Chosen
from hvdtrain.parallel.stage import AUTOCAST, DTYPES
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.recompute import recomputed_components
from hvdtrain.world import World


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
        classes=index.classes,
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
