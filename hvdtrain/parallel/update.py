"""Whether a step's gradients become an update, and how large they may be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.part import Part
from hvdtrain.parallel.step import Step


@dataclass(frozen=True)
class UpdateRule:
    """What is asked of gradients before they change the weights.

    A bad step is one whose gradients are no finite numbers, or larger than `largest_norm`.

    Attributes:
        clip_norm: scale gradients down to this norm, None for never.
        largest_norm: of all gradients together, before clipping.
        skips: leave a bad step out as a whole, on all ranks. Otherwise each stage that is bad is
            left as it is, and the others are updated: enough where the run ends with the step.
    """

    clip_norm: float | None = None
    largest_norm: float = math.inf
    skips: bool = False

    @property
    def needs_norm(self) -> bool:
        """Whether the norm over all stages has to be known before any of them is updated."""
        return self.clip_norm is not None or self.largest_norm < math.inf or self.skips


def update(
    rule: UpdateRule,
    stage: int,
    parts: Mapping[int, Part],
    exchange: Exchange | None,
    step: Step,
) -> None:
    """Let the reduced gradients of a stage change its weights, unless they are bad; forget them.

    Where the rule asks for the norm, the first stage of the step waits for all of them.
    """
    part = parts[stage]
    if not rule.needs_norm:
        step.reduction.add(part.gradients.finish())
        is_bad = not part.gradients.are_finite()
        step.is_bad |= is_bad
    else:
        if not step.is_finished:
            _judge(rule, parts, exchange, step)
        is_bad = step.is_bad
    if part.optimizer is not None and not is_bad:
        part.optimizer.step()
    part.gradients.zero()


def copied_buffers(parts: Mapping[int, Part]) -> dict[int, dict[str, Tensor]]:
    """Of each stage what forwards change, by name: running statistics and other buffers."""
    return {
        number: {name: value.clone() for name, value in _changed_by_forwards(part).items()}
        for number, part in parts.items()
    }


def restore_buffers(parts: Mapping[int, Part], kept: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Put back what was copied before."""
    for number, part in parts.items():
        own = _changed_by_forwards(part)  # without what was made since
        part.model.put({name: value for name, value in kept[number].items() if name in own})


def _changed_by_forwards(part: Part) -> dict[str, Tensor]:
    return part.model.statistics() | part.model.states()


def _judge(
    rule: UpdateRule, parts: Mapping[int, Part], exchange: Exchange | None, step: Step
) -> None:
    """Whether the gradients of all stages together may change the weights; clip them."""
    for part in parts.values():
        step.reduction.add(part.gradients.finish())
    step.norm = total_norm(parts, exchange)
    # Not a number is not within the limit either.
    step.is_bad = not (step.norm <= rule.largest_norm and step.norm < math.inf)
    if rule.clip_norm is not None and not step.is_bad:
        clip_gradients(step.norm, rule.clip_norm, parts)
    step.is_finished = True


def total_norm(parts: Mapping[int, Part], exchange: Exchange | None) -> float:
    """The norm of the reduced gradients of all stages together. Collective.

    The first replica of each stage counts for it, and all ranks sum in the same order, so that
    all of them find the same to the bit.
    """
    own = torch.zeros(1, dtype=torch.float64)
    for part in parts.values():
        gradients = _gradients(part)
        if part.is_first_replica and gradients:
            own += torch.nn.utils.get_total_norm(gradients).double().cpu() ** 2
    squares = exchange.gather_all(own) if exchange else own
    return float(squares.sum().sqrt())


def clip_gradients(norm: float, largest: float, parts: Mapping[int, Part]) -> None:
    """Scale all gradients, whose norm is `norm`, so that it is at most `largest`.

    Pascanu et al., arXiv 1211.5063, section 3.2.
    """
    scale = largest / (norm + 1e-6)
    if scale < 1:
        for part in parts.values():
            if gradients := _gradients(part):
                torch._foreach_mul_(gradients, scale)


def _gradients(part: Part) -> list[Tensor]:
    return [value.grad for value in part.parameters if value.grad is not None]
