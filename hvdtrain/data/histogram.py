"""Exact mean and standard deviation of pixels, computed from the histogram of their values."""

import math

import numpy as np
from numpy.typing import NDArray

_BLOCK_ROWS = 1024  # images counted at a time for the mean


def count_values(images: NDArray[np.uint8], histogram: NDArray[np.int64]) -> None:
    """Add the counts of each value 0..255 in each channel to `histogram` [channels, 256]."""
    for start in range(0, len(images), _BLOCK_ROWS):
        block = images[start : start + _BLOCK_ROWS]
        for channel in range(len(histogram)):
            values = np.ascontiguousarray(block[..., channel]).reshape(-1)
            histogram[channel] += np.bincount(values, minlength=256)


def mean_and_std(histogram: NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of pixels in 0..1, from integer sums."""
    mean, std = [], []
    for counts in histogram.tolist():
        pixels = sum(counts)
        first = sum(value * count for value, count in enumerate(counts))
        second = sum(value * value * count for value, count in enumerate(counts))
        variance = (pixels * second - first * first) / (pixels * 255) ** 2
        mean.append(first / (pixels * 255))
        std.append(math.sqrt(variance) if variance > 0 else 1.0)
    return tuple(mean), tuple(std)
