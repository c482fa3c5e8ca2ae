"""The views of a test image whose mean an evaluation takes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class View:
    """One way to look at an image.

    Attributes:
        weight: of its logits; those of all views add up to 1.
        shift: pixels by which the image moves down and right; its border is mirrored.
    """

    weight: float = 1.0
    is_mirrored: bool = False
    shift: int = 0

    def of(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return images uint8 [n, height, width, channels] in this view."""
        if self.shift:
            _, height, width, _ = images.shape
            border, start = abs(self.shift), abs(self.shift) - self.shift
            sides = ((0, 0), (border, border), (border, border), (0, 0))
            padded = np.pad(images, sides, "reflect")
            images = padded[:, start : start + height, start : start + width]
        if self.is_mirrored:
            images = images[:, :, ::-1]
        return np.ascontiguousarray(images)


def views(name: str) -> tuple[View, ...]:
    """Return the views of a value of `--test-augment`.

    "flip-shift" has the weights of Jordan, arXiv 2404.00498, section 3.5: half for the image and
    its mirror image, half for both of them at two places.
    """
    if name == "none":
        return (View(),)
    if name == "flip":
        return tuple(View(0.5, is_mirrored) for is_mirrored in (False, True))
    return tuple(
        View(weight, is_mirrored, shift)
        for shift, weight in ((0, 0.25), (-1, 0.125), (1, 0.125))
        for is_mirrored in (False, True)
    )
