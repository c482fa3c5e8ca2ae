"""Which buffers of a model its forwards change: tried out, on every replica."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.models.component import Component, build_component
from hvdtrain.parallel.form import Form
from hvdtrain.parallel.part import Part
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.stage import DTYPES, StageModel
from hvdtrain.training.parts import recomputed_components
from hvdtrain.world import World

ROWS = 2


def find_states(
    config: TrainConfig,
    plan: Plan,
    parts: Mapping[int, Part],
    components: Sequence[Component],
    given: Sequence[Form],
    here: World,
    device: torch.device,
) -> None:
    """Tell each part's model which of its buffers change. Collective.

    Args:
        given: what goes into each stage.

    Raises:
        UsageError: on all ranks, where a component that changes some would run twice in a step.
    """
    by_name = {part.name: part for part in components}
    own = {
        number: changing_buffers(config, part.model, by_name, given[number].empty(ROWS, device))
        for number, part in parts.items()
    }
    told = here.gather(own)
    recomputed = recomputed_components(config.recompute, list(by_name))
    for number, stage in enumerate(plan.stages):
        found = frozenset[str]().union(*(told[rank].get(number, ()) for rank in stage.ranks))
        for name in sorted(found):
            owner = next(each for each in stage.components if name.startswith(f"{each}."))
            if owner in recomputed:
                raise UsageError(
                    f"--recompute runs {owner} twice in a step, and each run changes its buffer "
                    f"{name}: leave {owner} out of --recompute"
                )
        if number in parts:
            parts[number].model.changing = found


def changing_buffers(
    config: TrainConfig, model: StageModel, components: Mapping[str, Component], given: Tensor
) -> frozenset[str]:
    """The buffers, but for batch norms' statistics, that a forward in training mode changes.

    Their components are built again for it, so that the model stays as it is. Where one of them
    cannot run alone, all of its buffers count.
    """
    candidates = {
        name: [f"{name}.{key}" for key, _ in module.named_buffers()]
        for name, module in model.components.items()
    }
    statistics = model.statistics().keys()
    wanted = {name for name, keys in candidates.items() if set(keys) - statistics}
    if not wanted:
        return frozenset()
    found: set[str] = set()
    is_bf16 = config.precision == "bf16"
    autocast = torch.autocast(given.device.type, dtype=torch.bfloat16) if is_bf16 else None
    with torch.random.fork_rng(devices=[]), autocast or nullcontext():
        torch.default_generator.manual_seed(config.seed)
        given.normal_()
        for name, module in model.components.items():
            if name in wanted:
                module = build_component(
                    components[name], config.seed, given.device, DTYPES[config.precision]
                ).train()
            before = _copied(module)
            try:
                given = module(given).detach() if name in wanted else _evaluated(module, given)
            except Exception:  # the run will say what is wrong, if anything is
                return frozenset(found | {key for keys in candidates.values() for key in keys})
            found |= {
                f"{name}.{key}"
                for key, value in module.named_buffers()
                if _is_other(before[key], value)
            }
    return frozenset(found - statistics)


def _copied(module: nn.Module) -> dict[str, tuple[Tensor, int, Tensor]]:
    return {key: (value, value._version, value.clone()) for key, value in module.named_buffers()}


def _is_other(before: tuple[Tensor, int, Tensor], after: Tensor) -> bool:
    """Whether a buffer was changed, be it to the same value."""
    tensor, version, value = before
    return after is not tensor or after._version != version or not torch.equal(after, value)


def _evaluated(module: nn.Module, given: Tensor) -> Tensor:
    module.eval()
    with torch.no_grad():
        emitted: Tensor = module(given)
    module.train()
    return emitted
