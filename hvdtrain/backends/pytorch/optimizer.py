"""The optimizer of a run, and its state by parameter name."""

from collections.abc import Mapping
from inspect import unwrap
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hvdtrain.config import TrainConfig

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def make_optimizer(
    config: TrainConfig,
    parameters: Mapping[str, nn.Parameter],
    undecayed: frozenset[str] = frozenset(),
) -> torch.optim.Optimizer:
    """Return the optimizer of a run, with torch's fused kernels.

    Args:
        undecayed: names of the parameters without weight decay.
    """
    lr, decay = config.learning_rate(), config.weight_decay
    values: list[Any] = list(parameters.values())
    if decay and not undecayed.isdisjoint(parameters):
        free = [value for name, value in parameters.items() if name in undecayed]
        others = [value for name, value in parameters.items() if name not in undecayed]
        values = [{"params": others}] if others else []
        values.append({"params": free, "weight_decay": 0.0})
    if config.optimizer == "sgd":
        nesterov = config.momentum > 0
        sgd = _without_compiler(torch.optim.SGD)
        return sgd(values, lr, config.momentum, 0, decay, nesterov, fused=True)
    adam = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return _without_compiler(adam)(values, lr=lr, weight_decay=decay, fused=True)


def _without_compiler(kind: type[Kind]) -> type[Kind]:
    """Return the class with methods that have no guards against being compiled.

    Torch's guards load its compiler, which takes a third of a rank's start-up time, and this
    toolkit never compiles an optimizer.
    """
    methods = {name: unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad")}
    step = torch.no_grad()(unwrap(kind.step))
    return cast(type[Kind], type(kind.__name__, (kind,), methods | {"step": step}))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use `value` as the learning rate of the next steps."""
    for group in optimizer.param_groups:
        group["lr"] = value


def state_by_name(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer's tensors by parameter name and key; empty before the first step."""
    return {
        name: {key: torch.as_tensor(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in parameters.items()
        if optimizer.state.get(parameter)
    }


def state_shapes(
    config: TrainConfig, parameter: torch.Size | tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Return keys and shapes of the optimizer's tensors for a parameter after the first step."""
    same = tuple(parameter)
    if config.optimizer == "sgd":
        return {"momentum_buffer": same} if config.momentum > 0 else {}
    return {"step": (), "exp_avg": same, "exp_avg_sq": same}


def restore_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Restore saved tensors into the optimizer, in the memory format of their parameters."""
    for name, entries in state.items():
        parameter = parameters[name]
        for key, value in entries.items():
            if value.shape == parameter.shape and value.dim() > 0:
                restored = torch.empty_like(parameter, requires_grad=False).copy_(value)
            else:
                restored = value.to(parameter.device, copy=True)
            optimizer.state[parameter][key] = restored
