"""A split of a data set in the memory of a device, and its augmentation there.

A batch then is a few numbers per image: where its pixels come from. They are those of
`data.augment`, so that the images are the same to the bit as when the host makes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvdtrain.data.augment import PADDING, Places


@dataclass(frozen=True)
class Resident:
    """The images of a split on a device: uint8 [samples, H, W, C]."""

    images: Tensor

    def take(self, places: Places) -> Tensor:
        """Return the images uint8 [n, H, W, C], as `crop_flip` makes them."""
        device, (_, height, width, _) = self.images.device, self.images.shape
        rows = self._numbers([places.rows])[0]
        if places.moves is None:
            return self.images[rows]
        top, left, mirrored = self._numbers(places.moves)
        y = top[:, None] + torch.arange(height, device=device) - PADDING
        x = torch.arange(width, device=device).expand(len(places), width)
        x = torch.where(mirrored[:, None] > 0, width - 1 - x, x) + left[:, None] - PADDING
        inside_y, inside_x = y.clamp(0, height - 1), x.clamp(0, width - 1)
        pixels = self.images[rows[:, None, None], inside_y[:, :, None], inside_x[:, None, :]]
        is_inside = (y == inside_y)[:, :, None] & (x == inside_x)[:, None, :]
        moved: Tensor = pixels * is_inside[..., None]
        return moved

    def _numbers(self, arrays: Sequence[NDArray[np.generic]]) -> Tensor:
        """Return small arrays [n] as int64 [arrays, n] on the device, in one copy."""
        stacked = np.stack([array.astype(np.int64) for array in arrays])
        return torch.from_numpy(stacked).to(self.images.device, non_blocking=True)
