"""What one sample is where two stages meet."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """What one sample is where stages meet: its shape, dtype and memory format."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, batch: Tensor) -> "Form":
        """The form of the samples of `batch`, [n, ...]; n has to be above 1 to show its format."""
        is_last = batch.dim() == 4 and batch.is_contiguous(memory_format=torch.channels_last)
        return cls(tuple(batch.shape[1:]), batch.dtype, is_last and not batch.is_contiguous())

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def empty(self, rows: int, device: torch.device) -> Tensor:
        """A new tensor [rows, *shape] in which each sample is contiguous."""
        with torch.inference_mode(False):  # it may be used again outside
            return torch.empty(
                (rows, *self.shape), dtype=self.dtype, device=device, memory_format=self._format
            )

    def arranged(self, batch: Tensor) -> Tensor:
        """`batch`, copied only if its memory is in another order.

        Raises:
            RuntimeError: if it has another shape or dtype, which no receiver could know.
        """
        if batch.shape[1:] != self.shape or batch.dtype != self.dtype:
            raise RuntimeError(
                f"a boundary of {self.shape} {self.dtype} was given {tuple(batch.shape[1:])} "
                f"{batch.dtype}: a component must always emit the same"
            )
        return batch.contiguous(memory_format=self._format)

    @property
    def _format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format
