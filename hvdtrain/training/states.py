"""Which buffers of a model its forwards change: tried out, on every replica."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.models.component import Component, build_component
from hvdtrain.parallel.form import Form
from hvdtrain.parallel.part import Part
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.stage import DTYPES, StageModel
from hvdtrain.parallel.states import bytes_of
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
        number: try_buffers(config, part.model, by_name, given[number].empty(ROWS, device))
        for number, part in parts.items()
    }
    told = here.gather(own)
    for number, stage in enumerate(plan.stages):
        found = [told[rank][number] for rank in stage.ranks]
        _check_recomputed(config, list(by_name), set().union(*(each.altered for each in found)))
        if number in parts:
            names = (each.changing for each in found)
            parts[number].model.changing = frozenset[str]().union(*names)


@dataclass
class Tried:
    """Names of buffers: of components that change some in training; those with another value."""

    changing: set[str] = field(default_factory=set)
    altered: set[str] = field(default_factory=set)


def _check_recomputed(config: TrainConfig, names: list[str], altered: set[str]) -> None:
    recomputed = recomputed_components(config.recompute, names)
    for name in sorted(altered):
        owner = next(each for each in names if name.startswith(f"{each}."))
        if owner in recomputed:
            raise UsageError(
                f"--recompute runs {owner} twice in a step, and each run changes its buffer "
                f"{name}: leave {owner} out of --recompute"
            )


def try_buffers(
    config: TrainConfig, model: StageModel, components: Mapping[str, Component], given: Tensor
) -> Tried:
    """Which buffers, but for batch norms' statistics, forwards in training mode change.

    Two forwards, on zeros and on ones. The components are built again for it, so that the model
    stays as it is. All buffers of a component count that changes one of them: it may change others
    later. So do all where a component cannot run alone; the run will say what is wrong, if
    anything is. A buffer that takes another form belongs to no replica but its own.
    """
    statistics = model.statistics().keys()
    candidates = {
        name: {f"{name}.{key}" for key, _ in module.named_buffers()} - statistics
        for name, module in model.components.items()
    }
    found = Tried()
    if not any(candidates.values()):
        return found
    is_bf16 = config.precision == "bf16"
    autocast = torch.autocast(given.device.type, dtype=torch.bfloat16) if is_bf16 else None
    with torch.random.fork_rng(devices=[]), autocast or nullcontext():
        inputs = [torch.zeros_like(given), torch.ones_like(given)]
        for name in model.components:
            module = build_component(
                components[name], config.seed, given.device, DTYPES[config.precision]
            ).train()
            before = _seen(name, module)
            try:
                inputs[0] = module(inputs[0]).detach()
                between = _seen(name, module)
                inputs[1] = module(inputs[1]).detach()
            except Exception:
                return Tried(set().union(*candidates.values()))
            after = _seen(name, module)
            kept = {
                key
                for key in candidates[name]
                if after[key].form == between[key].form == before[key].form
            }
            if any(before[key].differs(after[key]) for key in kept):
                found.changing |= kept
            found.altered |= {key for key in kept if between[key].bits != after[key].bits}
    return found


class _Seen(NamedTuple):
    """A buffer as it is at a time."""

    tensor: Tensor
    version: int
    form: tuple[torch.dtype, torch.Size]
    bits: bytes

    def differs(self, other: "_Seen") -> bool:
        """Whether it was changed, be it to the same value."""
        is_same = self.tensor is other.tensor and self.version == other.version
        return not is_same or self.bits != other.bits


def _seen(name: str, module: nn.Module) -> dict[str, _Seen]:
    return {
        f"{name}.{key}": _Seen(
            value,
            0 if value.is_inference() else value._version,  # it has none
            (value.dtype, value.shape),
            bytes_of(value).cpu().numpy().tobytes(),
        )
        for key, value in module.named_buffers()
    }
