"""The optimizers of a run: torch's, or one that a user's function makes."""

from collections.abc import Callable, Mapping
from inspect import unwrap
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.models.find import call_users, find_function
from hvdtrain.options.sections import OPTIMIZERS

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)

SCALE = "lr_scale"  # key of a parameter group of a user's own: factor of the learning rate


def make_optimizer(
    config: TrainConfig,
    parameters: Mapping[str, nn.Parameter],
    undecayed: frozenset[str] = frozenset(),
) -> torch.optim.Optimizer:
    """Return the optimizer of a run, with torch's fused kernels.

    Args:
        undecayed: names of the parameters without weight decay.

    Raises:
        UsageError: if a user's function fails, or returns something else.
    """
    if config.optimizer not in OPTIMIZERS:
        return _own_optimizer(config, parameters)
    groups: dict[float, list[Tensor]] = {}
    for name, value in parameters.items():
        decay = 0.0 if name in undecayed else config.weight_decay
        groups.setdefault(decay, []).append(value)
    values = [{"params": members, "weight_decay": decay} for decay, members in groups.items()]
    kind, options = _kind(config)
    return kind(values, lr=config.learning_rate(), fused=True, **options)


def _own_optimizer(
    config: TrainConfig, parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the optimizer that a user's function makes; a group's rate is a factor of --lr."""
    where, lr = f"--optimizer {config.optimizer}", config.learning_rate()
    function = find_function(config.optimizer, "optimizer")
    optimizer = call_users(where, function, dict(parameters), lr)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"{where} returned a {type(optimizer).__name__}: return a torch.optim.Optimizer of "
            "the parameters that it gets"
        )
    updated = [id(value) for group in optimizer.param_groups for value in group["params"]]
    if sorted(updated) != sorted(id(value) for value in parameters.values()):
        raise UsageError(
            f"{where} returned an optimizer of other parameters than those that it gets: pass it "
            "each of them, once"
        )
    for group in optimizer.param_groups:
        group[SCALE] = group["lr"] / lr
    set_progress(optimizer, 0.0, 0.5)  # in steps of no run, as of `plan check`
    return optimizer


def check_state(config: TrainConfig, parameters: Mapping[str, nn.Parameter]) -> None:
    """Make a step of a user's optimizer with copies of weights, and look at its state.

    Raises:
        UsageError: if it fails, or has a state that a checkpoint cannot hold.
    """
    if config.optimizer in OPTIMIZERS or not parameters:
        return
    copies = {name: nn.Parameter(value.detach().clone()) for name, value in parameters.items()}
    optimizer = make_optimizer(config, copies)
    for value in copies.values():
        value.grad = torch.zeros_like(value)
    call_users(f"a step of --optimizer {config.optimizer}", optimizer.step)
    for name, value in copies.items():
        for key, item in optimizer.state.get(value, {}).items():
            if not isinstance(item, Tensor | int | float):
                raise UsageError(
                    f"--optimizer {config.optimizer} keeps a {type(item).__name__} as {key!r} of "
                    f"{name}, which a checkpoint cannot hold: use tensors and numbers"
                )


def _kind(
    config: TrainConfig,
) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of the optimizer and the arguments that only it has."""
    options: dict[str, Any] = {}
    kind: type[torch.optim.Optimizer]
    if config.optimizer == "sgd":
        options = {"momentum": config.momentum, "nesterov": config.momentum > 0}
        kind = torch.optim.SGD
    else:
        kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return _without_compiler(kind), options


def _without_compiler(kind: type[Kind]) -> type[Kind]:
    """Return the class with methods that have no guards against being compiled.

    Torch's guards load its compiler, which takes a third of a rank's start-up time, and this
    toolkit never compiles an optimizer.
    """
    methods = {name: unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad")}
    quick = torch.no_grad()(unwrap(kind.step))
    return cast(type[Kind], type(kind.__name__, (kind,), methods | {"step": quick}))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use `value`, times the factor of each group, as the learning rate of the next steps."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get(SCALE, 1.0)


def set_progress(optimizer: torch.optim.Optimizer, before: float, after: float) -> None:
    """Set the shares of the run that are done before and after the next step, for its step."""
    for group in optimizer.param_groups:
        group["progress"] = before, after
