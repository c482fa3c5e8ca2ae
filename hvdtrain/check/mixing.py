"""Detection of components that mix the samples of a batch, which a plan would divide."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hvdtrain.models.component import Component, build_component

SAMPLES = 4  # images of a trial: two halves, since some models cannot take one image
NOISE = 0.05  # added to parameters: a branch whose weights start at zero would hide what it does
TOLERANCE = 1e-9  # of results in fp64, relative to the largest


@torch.no_grad()
def mixing_component(components: Sequence[Component], images: Tensor, seed: int) -> str:
    """Return the first component whose result for a sample depends on others; empty if none does.

    New components with noisy weights get a few images together, and then in two halves, in fp64.
    Batch norm uses its running statistics meanwhile: plans know what it does.
    What draws random numbers is not tried in training mode, only in evaluation mode.

    Args:
        images: floating [n, C, H, W], normalised; up to 4 of them are used.
    """
    inputs = images[:SAMPLES].double()
    for component in components if len(inputs) > 1 else ():
        module = build_component(component, seed, images.device, torch.float64)
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=NOISE)
        if _mixes(module.train(), inputs) or _mixes(module.eval(), inputs):
            return component.name
        inputs = module(inputs)
    return ""


def _mixes(module: nn.Module, inputs: Tensor) -> bool:
    for part in module.modules():
        if isinstance(part, _BatchNorm | _DropoutNd):
            part.eval()
    whole, again = module(inputs.clone()), module(inputs.clone())
    if not torch.equal(whole, again):  # it draws random numbers, or counts its calls
        return False
    half = len(inputs) // 2
    divided = torch.cat([module(inputs[:half].clone()), module(inputs[half:].clone())])
    largest = float(whole.abs().max())
    return not float((whole - divided).abs().max()) <= TOLERANCE * max(largest, 1.0)
