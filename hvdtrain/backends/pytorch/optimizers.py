"""The optimizers of a run: torch's, with decoupled decay, lookahead, and rates by parameter."""

from collections.abc import Callable, Mapping
from inspect import unwrap
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hvdtrain.config import TrainConfig

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)

SCALE = "lr_scale"  # key of a parameter group: factor of the learning rate
SLOW_SHARE = "slow_share"  # key of a parameter group: as in `set_slow_share`
SLOW = "slow"  # key of a parameter's state: its slow weights


def make_optimizer(
    config: TrainConfig,
    parameters: Mapping[str, nn.Parameter],
    undecayed: frozenset[str] = frozenset(),
    scales: Mapping[str, float] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer of a run, with torch's fused kernels.

    Args:
        undecayed: names of the parameters without weight decay.
        scales: factors of the learning rate by name, where they are not 1.
    """
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, value in parameters.items():
        scale = scales.get(name, 1.0) if scales else 1.0
        decay = 0.0 if name in undecayed else config.weight_decay / scale
        groups.setdefault((decay, scale), []).append(value)
    lr = config.learning_rate()
    values = [
        {"params": members, "weight_decay": decay, SCALE: scale, "lr": lr * scale}
        for (decay, scale), members in groups.items()
    ]
    kind, options = _kind(config)
    return kind(values, lr=lr, fused=True, **options)


def _kind(
    config: TrainConfig,
) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of the optimizer and the arguments that only it has."""
    options: dict[str, Any] = {}
    kind: type[torch.optim.Optimizer]
    if config.optimizer in ("sgd", "sgdw"):
        options = {"momentum": config.momentum, "nesterov": config.momentum > 0}
        kind = torch.optim.SGD
    else:
        kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    step = unwrap(kind.step)
    if config.optimizer == "sgdw":
        step = _with_decoupled_decay(step)
    if config.lookahead is not None:
        step = _with_lookahead(step)
    return _without_compiler(kind, step), options


def _with_decoupled_decay(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that shrinks the weights by rate x decay, apart from the momentum."""

    def decoupled(self: torch.optim.Optimizer, closure: None = None) -> None:
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            factor = 1 - group["lr"] * group["weight_decay"]
            updated = [value for value in group["params"] if value.grad is not None]
            if factor != 1 and updated:
                torch._foreach_mul_(updated, factor)
            group["weight_decay"] = 0.0
        try:
            step(self, closure)
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    return decoupled


def _with_lookahead(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step after which weights and slow weights may meet (arXiv 1907.08610).

    The slow weights w' start as the weights w before the first step. With a share s both become
    s w' + (1 - s) w.
    """

    def looking_ahead(self: torch.optim.Optimizer, closure: None = None) -> None:
        values = [value for group in self.param_groups for value in group["params"]]
        # Adam takes a state with any entry for its own, so that they wait here.
        new = {value: value.detach().clone() for value in values if SLOW not in self.state[value]}
        for value in new:
            if not self.state[value]:
                del self.state[value]  # reading the state has made an empty one
        step(self, closure)
        for value, slow in new.items():
            if value in self.state or value.grad is not None:
                self.state[value][SLOW] = slow
        for group in self.param_groups:
            share = group.get(SLOW_SHARE)
            if share is None:
                continue
            for value in group["params"]:
                if SLOW in self.state[value]:
                    slow = self.state[value][SLOW]
                    value.copy_(slow.lerp_(value, 1 - share))

    return looking_ahead


def _without_compiler(kind: type[Kind], step: Callable[..., Any]) -> type[Kind]:
    """Return the class with this step and methods that have no guards against being compiled.

    Torch's guards load its compiler, which takes a third of a rank's start-up time, and this
    toolkit never compiles an optimizer.
    """
    methods = {name: unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad")}
    quick = torch.no_grad()(step)
    return cast(type[Kind], type(kind.__name__, (kind,), methods | {"step": quick}))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use `value`, times the factor of each group, as the learning rate of the next steps."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get(SCALE, 1.0)


def set_slow_share(optimizer: torch.optim.Optimizer, share: float | None) -> None:
    """Set how much of the slow weights stays when weights meet them after the next step.

    None: they do not meet.
    """
    for group in optimizer.param_groups:
        group[SLOW_SHARE] = share
