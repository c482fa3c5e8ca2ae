"""The memory formats of weights and of gradients, which are those of the activations."""

import torch
from torch import Tensor, nn


def to_channels_last(module: nn.Module) -> None:
    """Give tensors of four dimensions channels_last format; Module.to fails for those of five."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


def keeping_format(activations: Tensor) -> Tensor:
    """Return activations whose gradient will have channels_last format if they have it.

    The gradient of a Flatten has not. The component before it would then compute its backward in
    two formats, with copies of larger tensors than this one.
    """
    if activations.requires_grad and activations.dim() == 4 and _is_channels_last(activations):
        activations.register_hook(_as_channels_last)
    return activations


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _as_channels_last(gradient: Tensor) -> Tensor:
    return gradient.contiguous(memory_format=torch.channels_last)
