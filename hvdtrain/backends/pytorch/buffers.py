"""Detection of the buffers that a model's forwards change, by a trial on every replica."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hvdtrain.backends.pytorch.parts import recomputed_components
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.models.component import Component, build_component
from hvdtrain.parallel.boundary import Form
from hvdtrain.parallel.reduce import bytes_of
from hvdtrain.parallel.stage import DTYPES, Part, StageModel
from hvdtrain.plan.plan import Plan
from hvdtrain.world import World

ROWS = 2


def find_states(
    config: TrainConfig,
    plan: Plan,
    parts: Mapping[int, Part],
    components: Sequence[Component],
    inputs: Sequence[Form],
    world: World,
    device: torch.device,
) -> None:
    """Set on the model of each part which of its buffers change. Collective.

    Args:
        inputs: the form of each stage's input.

    Raises:
        UsageError: on all ranks, if a component that changes buffers would run twice per step.
    """
    by_name = {part.name: part for part in components}
    tried = {
        number: try_buffers(config, part.model, by_name, inputs[number].empty(ROWS, device))
        for number, part in parts.items()
    }
    everywhere = world.gather(tried)
    for number, stage in enumerate(plan.stages):
        replicas = [everywhere[rank][number] for rank in stage.ranks]
        _check_recomputed(
            config, list(by_name), set().union(*(replica.altered for replica in replicas))
        )
        if number in parts:
            names = (replica.changing for replica in replicas)
            parts[number].model.changing = frozenset[str]().union(*names)


@dataclass
class Tried:
    """Names of buffers after a trial.

    Attributes:
        changing: all buffers of components that change at least one of them in training.
        altered: buffers that have another value than before.
    """

    changing: set[str] = field(default_factory=set)
    altered: set[str] = field(default_factory=set)


def _check_recomputed(config: TrainConfig, names: list[str], altered: set[str]) -> None:
    recomputed = recomputed_components(config.recompute, names)
    for name in sorted(altered):
        owner = next(candidate for candidate in names if name.startswith(f"{candidate}."))
        if owner in recomputed:
            raise UsageError(
                f"--recompute runs {owner} twice per step, and each run changes its buffer "
                f"{name}: remove {owner} from --recompute"
            )


def try_buffers(
    config: TrainConfig, model: StageModel, components: Mapping[str, Component], example: Tensor
) -> Tried:
    """Return the buffers that forwards in training mode change, without batch norm's statistics.

    The trial is two forwards, on zeros and on ones, of components that are built again, so that
    the model stays as it is. If a component changes one buffer, all of its buffers count: it may
    change others later. If a component cannot run alone, all buffers of the model count; the run
    itself will report an error, if there is one. A buffer whose dtype or shape changes does not
    count: replicas do not share it.
    """
    statistics = model.statistics().keys()
    candidates = {
        name: {f"{name}.{key}" for key, _ in module.named_buffers()} - statistics
        for name, module in model.components.items()
    }
    tried = Tried()
    if not any(candidates.values()):
        return tried
    is_bf16 = config.precision == "bf16"
    autocast = torch.autocast(example.device.type, dtype=torch.bfloat16) if is_bf16 else None
    with torch.random.fork_rng(devices=[]), autocast or nullcontext():
        inputs = [torch.zeros_like(example), torch.ones_like(example)]
        for name in model.components:
            module = build_component(
                components[name], config.seed, example.device, DTYPES[config.precision]
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
                tried.changing |= kept
            tried.altered |= {key for key in kept if between[key].bits != after[key].bits}
    return tried


class _Seen(NamedTuple):
    """The state of a buffer at one time."""

    tensor: Tensor
    version: int
    form: tuple[torch.dtype, torch.Size]
    bits: bytes

    def differs(self, other: "_Seen") -> bool:
        """Return whether the buffer was written in between, even with the same value."""
        is_same = self.tensor is other.tensor and self.version == other.version
        return not is_same or self.bits != other.bits


def _seen(name: str, module: nn.Module) -> dict[str, _Seen]:
    return {
        f"{name}.{key}": _Seen(
            value,
            0 if value.is_inference() else value._version,  # inference tensors have no version
            (value.dtype, value.shape),
            bytes_of(value).cpu().numpy().tobytes(),
        )
        for key, value in module.named_buffers()
    }
