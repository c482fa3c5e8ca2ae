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

from hvdtrain.data.augment import Border, Places


@dataclass(frozen=True)
class Resident:
    """The images of a split on a device.

    Attributes:
        images: uint8 [samples, H, W, C].
        padding, border: as in `data.augment.crop_flip`.
        side: of the blanked squares, in pixels.
        fill: value of a blanked pixel, uint8 [C].
    """

    images: Tensor
    padding: int
    border: Border
    side: int
    fill: Tensor

    def take(self, places: Places) -> Tensor:
        """Return the images uint8 [n, H, W, C], as `crop_flip` and `cutout` make them."""
        device, (_, height, width, _) = self.images.device, self.images.shape
        rows = self._numbers([places.rows])[0]
        if places.moves is None:
            pixels = self.images[rows]
        else:
            top, left, mirrored = self._numbers(places.moves)
            y = top[:, None] + torch.arange(height, device=device) - self.padding
            x = torch.arange(width, device=device).expand(len(places), width)
            x = torch.where(mirrored[:, None] > 0, width - 1 - x, x) + left[:, None] - self.padding
            pixels = self._gather(rows, y, x)
        if places.squares is not None:
            pixels = self._blank(pixels, self._numbers(places.squares))
        return pixels

    def _numbers(self, arrays: Sequence[NDArray[np.generic]]) -> Tensor:
        """Return small arrays [n] as int64 [arrays, n] on the device, in one copy."""
        stacked = np.stack([array.astype(np.int64) for array in arrays])
        return torch.from_numpy(stacked).to(self.images.device, non_blocking=True)

    def _gather(self, rows: Tensor, y: Tensor, x: Tensor) -> Tensor:
        """Return pixels (y, x) of images, [n, H] and [n, W]; some lie outside of them."""
        _, height, width, _ = self.images.shape
        if self.border == "reflect":
            inside_y, inside_x = _reflected(y, height), _reflected(x, width)
        else:
            inside_y, inside_x = y.clamp(0, height - 1), x.clamp(0, width - 1)
        pixels = self.images[rows[:, None, None], inside_y[:, :, None], inside_x[:, None, :]]
        if self.border == "zeros":
            is_inside = (y == inside_y)[:, :, None] & (x == inside_x)[:, None, :]
            pixels = pixels * is_inside[..., None]
        return pixels

    def _blank(self, images: Tensor, squares: Tensor) -> Tensor:
        _, height, width, _ = images.shape
        top, left = squares
        y, x = (torch.arange(size, device=images.device) for size in (height, width))
        in_rows = (y >= top[:, None]) & (y < top[:, None] + self.side)
        in_columns = (x >= left[:, None]) & (x < left[:, None] + self.side)
        is_blank = in_rows[:, :, None] & in_columns[:, None, :]
        return torch.where(is_blank[..., None], self.fill, images)


def _reflected(places: Tensor, size: int) -> Tensor:
    """Return where a place outside of 0 to size - 1 lies, mirrored at the border pixels."""
    places = places.abs()
    return torch.where(places >= size, 2 * (size - 1) - places, places)
