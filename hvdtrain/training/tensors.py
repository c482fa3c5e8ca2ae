"""Conversion between PyTorch tensors and NumPy arrays, which checkpoints are written from."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from hvdtrain.errors import UsageError
from hvdtrain.training.checkpoint import partfile


def check(tensors: Mapping[str, Tensor]) -> None:
    """Refuse a model that cannot be saved, before training starts.

    Raises:
        UsageError: if a tensor has a dtype that a checkpoint cannot hold.
    """
    for name, tensor in tensors.items():
        if str(tensor.dtype).removeprefix("torch.") not in partfile.DTYPES:
            raise UsageError(
                f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold: "
                "use another dtype for it"
            )


def to_array(tensor: Tensor) -> np.ndarray:
    """Return an array on the memory of a CPU tensor that needs no gradient."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_tensor(array: np.ndarray) -> Tensor:
    """Return a tensor on the memory of an array."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Copies:
    """Contiguous copies of tensors on the CPU, whose memory is used again for the same name."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Return copies of the tensors, by name; they overwrite those of the last call."""
        self._buffers = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        if any(tensor.device.type == "cuda" for tensor in tensors.values()):
            torch.cuda.synchronize()
        return {name: to_array(tensor) for name, tensor in self._buffers.items()}

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            on_gpu = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        return buffer.copy_(tensor.detach(), non_blocking=True)
