"""Clipping by the norm of all gradients together, whichever ranks hold them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.part import Part


def clip_gradients(largest: float, parts: Mapping[int, Part], exchange: Exchange | None) -> Tensor:
    """Scale the reduced gradients of all stages so that their norm is at most `largest`.

    The first replica of each stage counts for it, and all ranks sum in the same order, so that
    replicas stay equal to the bit. Pascanu et al., arXiv 1211.5063, section 3.2.

    Returns:
        The norm before, fp64, the same on all ranks.
    """
    gradients = {
        stage: [value.grad for value in part.parameters if value.grad is not None]
        for stage, part in parts.items()
    }
    own = torch.zeros(1, dtype=torch.float64)
    for stage, part in parts.items():
        if part.is_first_replica and gradients[stage]:
            own += torch.nn.utils.get_total_norm(gradients[stage]).double().cpu() ** 2
    squares = exchange.gather_all(own) if exchange else own
    norm = squares.sum().sqrt()
    scale = largest / (norm + 1e-6)
    if scale < 1:
        for found in gradients.values():
            if found:
                torch._foreach_mul_(found, float(scale))
    return norm
