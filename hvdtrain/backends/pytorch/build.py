"""Construction of the runtime that executes a plan on this rank."""

import math
from collections.abc import Mapping, Sequence
from importlib import import_module

import torch

from hvdtrain.backends.pytorch.buffers import find_states
from hvdtrain.backends.pytorch.parts import build_parts, probe_forms
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.health.stall import patience, stalled
from hvdtrain.host.activity import Activity
from hvdtrain.models.component import Component
from hvdtrain.options.planrequest import ADAPTIVE
from hvdtrain.parallel.boundary import Boundaries
from hvdtrain.parallel.dropout import Draws, follow_samples
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.runtime import Observer, Runtime, Settings
from hvdtrain.parallel.stage import ComponentClock, Images, Part
from hvdtrain.parallel.step import UpdateRule
from hvdtrain.plan.plan import Plan
from hvdtrain.world import World, notes


def build_runtime(
    config: TrainConfig,
    plan: Plan,
    components: Sequence[Component],
    images: Images,
    image_size: int,
    world: World,
    before: Runtime | None = None,
) -> Runtime:
    """Return the runtime of a plan on this rank. Collective.

    Args:
        before: the runtime of the previous plan, which the new one replaces; it must not be used
            any more.
    """
    device = images.device
    exchange = before.exchange if before else None
    if exchange is None and world.communicator is not None:
        exchange = Exchange(world.communicator, device)
    parts = build_parts(config, plan, components, world, exchange, device)
    _make_ready(config, plan, parts, world, device)
    forms = probe_forms(plan, parts, image_size, config, world, device)
    find_states(config, plan, parts, components, forms, world, device)
    settings = Settings(
        images=images,
        bf16=config.precision == "bf16",
        rule=_rule(config),
        label_smoothing=config.label_smoothing,
        draws=_draws(config, parts),
    )
    boundaries = Boundaries(world.rank, forms[1:], exchange, device)
    observer = before.observer if before else _observer(config, world)
    return Runtime(settings, parts, boundaries, observer)


def _make_ready(
    config: TrainConfig,
    plan: Plan,
    parts: Mapping[int, Part],
    world: World,
    device: torch.device,
) -> None:
    """Check that there are parameters, load what backward needs, attach clocks. Collective.

    Raises:
        UsageError: if no rank has anything to train.
    """
    if not any(world.gather(any(part.parameters for part in parts.values()))):
        raise UsageError(f"model {config.model} has no trainable parameters: give another --model")
    if any(number < plan.last for number in parts):
        # Torch loads it in the first backward pass that starts from a gradient, while other ranks
        # would wait.
        import_module("torch.fx.experimental.symbolic_shapes")
    if config.plan_request == ADAPTIVE and device.type == "cpu":
        for part in parts.values():
            part.model.clock = ComponentClock()


def _draws(config: TrainConfig, parts: Mapping[int, Part]) -> Draws:
    """Return the random draws of dropout: by sample, unless components are compiled."""
    draws = Draws()
    if not config.compile:
        for part in parts.values():
            for name, component in part.model.components.items():
                follow_samples(name, component, draws)
    return draws


def _observer(config: TrainConfig, world: World) -> Observer:
    activity = Activity(*notes(world.rank), patience(config), stalled)
    return Observer(activity, [] if config.trace is not None else None)


def _rule(config: TrainConfig) -> UpdateRule:
    return UpdateRule(
        config.clip_norm,
        config.gradient_limit if config.gradient_limit is not None else math.inf,
        skips=config.on_bad_step == "skip",
    )
