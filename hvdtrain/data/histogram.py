"""Mean and deviation of pixels, exact: from how often each value occurs."""

import math

import numpy as np
from numpy.typing import NDArray

_BLOCK_ROWS = 1024  # images counted at a time for the mean


def count_values(images: NDArray[np.uint8], histogram: NDArray[np.int64]) -> None:
    """Add how often each value 0..255 occurs in each channel: histogram [channels, 256]."""
    for start in range(0, len(images), _BLOCK_ROWS):
        block = images[start : start + _BLOCK_ROWS]
        for channel in range(len(histogram)):
            values = np.ascontiguousarray(block[..., channel]).reshape(-1)
            histogram[channel] += np.bincount(values, minlength=256)


def mean_and_std(histogram: NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation a channel of pixels in 0..1, from exact whole-number sums."""
    mean, std = [], []
    for counts in histogram.tolist():
        pixels = sum(counts)
        first = sum(value * count for value, count in enumerate(counts))
        second = sum(value * value * count for value, count in enumerate(counts))
        variance = (pixels * second - first * first) / (pixels * 255) ** 2
        mean.append(first / (pixels * 255))
        std.append(math.sqrt(variance) if variance > 0 else 1.0)
    return tuple(mean), tuple(std)
