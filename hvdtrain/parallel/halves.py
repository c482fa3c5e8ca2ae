"""A backward in two halves: the gradient of the input first, those of the weights later.

PyTorch's own split for zero-bubble schedules (Qi et al., arXiv 2401.10241). It is exact for what
plain autograd is exact for; hooks on parameters do not fire, and a backward function that
communicates would run twice, so the plan refuses the split where there is one. Importing it takes
longer than importing torch, so only a schedule that splits does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Groups = list[dict[str, Any]]  # PyTorch's, opaque to us


def backward_input(
    output: Tensor, gradient: Tensor | None, given: Tensor, parameters: Sequence[nn.Parameter]
) -> Groups:
    """Put the gradient of `given` into its grad; what `backward_weight` needs is returned.

    Args:
        output: of the stage, or the loss. gradient: of the output; None for a loss.
    """
    from torch.distributed.pipelining import _backward

    gradients = None if gradient is None else [gradient]
    _, groups = _backward.stage_backward_input([output], gradients, [given], iter(parameters))
    return groups


def backward_weight(groups: Groups, parameters: Sequence[nn.Parameter]) -> None:
    """Add the gradients of the weights to theirs."""
    from torch.distributed.pipelining import _backward

    _backward.stage_backward_weight(iter(parameters), groups)


def detachable(output: Tensor) -> Tensor:
    """The output as `backward_input` can detach it: a view cannot be detached in place."""
    return output.clone(memory_format=torch.preserve_format) if output._is_view() else output
