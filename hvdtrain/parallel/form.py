"""Shape, dtype and memory format of what crosses a boundary between two stages."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """Shape, dtype and memory format of one sample at a boundary between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, batch: Tensor) -> "Form":
        """Return the form of the samples of `batch`, [n, ...].

        n must be above 1: the strides of a single sample do not show its memory format.
        """
        is_last = batch.dim() == 4 and batch.is_contiguous(memory_format=torch.channels_last)
        return cls(tuple(batch.shape[1:]), batch.dtype, is_last and not batch.is_contiguous())

    @property
    def row_bytes(self) -> int:
        """Bytes per sample."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def empty(self, rows: int, device: torch.device) -> Tensor:
        """Return a new tensor [rows, *shape] in which each sample is contiguous."""
        with torch.inference_mode(False):  # the buffer is reused outside of inference mode
            return torch.empty(
                (rows, *self.shape), dtype=self.dtype, device=device, memory_format=self._format
            )

    def arranged(self, batch: Tensor) -> Tensor:
        """Return `batch` in this memory format; copy it only if needed.

        Raises:
            RuntimeError: if the shape or dtype differs, because receivers allocate by the form.
        """
        if batch.shape[1:] != self.shape or batch.dtype != self.dtype:
            raise RuntimeError(
                f"a component emitted samples of {tuple(batch.shape[1:])} {batch.dtype} instead "
                f"of {self.shape} {self.dtype}: it must emit the same shape and dtype each time"
            )
        return batch.contiguous(memory_format=self._format)

    @property
    def _format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format
