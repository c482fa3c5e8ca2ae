"""PyTorch's tensors as NumPy's arrays, in which checkpoints are written, and back."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from hvdtrain.errors import UsageError
from hvdtrain.training.checkpoint import partfile


def check(tensors: Mapping[str, Tensor]) -> None:
    """Refuse, before the work, a model that cannot be saved.

    Raises:
        UsageError: if a tensor is of a dtype that a checkpoint does not have.
    """
    for name, tensor in tensors.items():
        if str(tensor.dtype).removeprefix("torch.") not in partfile.DTYPES:
            raise UsageError(f"{name} is of {tensor.dtype}, which a checkpoint cannot hold")


def to_array(tensor: Tensor) -> np.ndarray:
    """The same memory; of a tensor on the CPU that needs no gradient."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_tensor(array: np.ndarray) -> Tensor:
    """The same memory."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Copies:
    """Copies of tensors on the CPU, contiguous, each in the memory of the last one of its name."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Copy all of them; those of the call before are overwritten."""
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
