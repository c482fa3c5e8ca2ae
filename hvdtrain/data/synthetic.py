"""A synthetic labelled data set made from a seed, for experiments without real data.

Each class is a smooth coloured pattern that wraps around the image. A sample is its class's
pattern and a weaker one of another class, each moved to a random place, under strong noise. A
linear model learns some of it, and a small convolutional network improves epoch by epoch. Samples
are computed with integers from a counter-based hash, so a seed gives the same bytes everywhere.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.augment import sample_hash, splitmix64
from hvdtrain.data.index import Index
from hvdtrain.data.writer import Layout, in_order, write_sources
from hvdtrain.errors import UsageError

_GRID = 6  # random points across a pattern
_CHANNELS = 3
_LARGEST_SIZE = 1024
_MOST_CLASSES = 10_000
_BLOCK_BYTES = 2**22  # images made at a time


def synth(
    destination: Path | str,
    images: int,
    classes: int,
    size: int = 32,
    seed: int = 0,
    shard_mb: int = 64,
) -> Index:
    """Make a data set of `images` train samples and a fifth as many for test; return its index.

    Images are uint8 [size, size, 3]; classes alternate. Raises UsageError for numbers out of
    range, DataError if the destination cannot be written.
    """
    _check("images", images, 1, 2**40)
    _check("classes", classes, 2, _MOST_CLASSES)
    _check("size", size, _GRID, _LARGEST_SIZE)
    patterns = class_patterns(classes, size, seed)
    test = max(1, images // 5)
    sources = {
        "train": in_order(_samples(patterns, seed, 0, images)),
        "test": in_order(_samples(patterns, seed, images, images + test)),
    }
    layout = Layout((size, size, _CHANNELS), shard_mb=shard_mb)
    return write_sources(
        destination, sources, layout, [f"class {number}" for number in range(classes)]
    )


def _check(name: str, value: int, smallest: int, largest: int) -> None:
    if not smallest <= value <= largest:
        raise UsageError(f"{name} is {value}: choose from {smallest} to {largest}")


def class_patterns(classes: int, size: int, seed: int) -> NDArray[np.int32]:
    """Return a smooth periodic pattern per class, values -128..127: [classes, size, size, 3].

    Random points on a coarse grid are interpolated linearly along both axes.
    """
    points = _random_bytes(seed, 0, np.arange(classes), _GRID * _GRID * _CHANNELS)
    grid = points.astype(np.int32).reshape(classes, _GRID, _GRID, _CHANNELS) - 128
    # Pixel p lies at p * _GRID / size on the grid: between `low` and the next, `part` / size on.
    low, part = np.divmod(np.arange(size) * _GRID, size)
    high = (low + 1) % _GRID
    down = part[:, None, None]
    tall = (grid[:, low] * (size - down) + grid[:, high] * down) // size
    across = part[:, None]
    return np.asarray(
        (tall[:, :, low] * (size - across) + tall[:, :, high] * across) // size, np.int32
    )


def _samples(
    patterns: NDArray[np.int32], seed: int, start: int, stop: int
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Yield samples start .. stop - 1 of this seed's endless sequence, a few at a time."""
    rows = max(1, _BLOCK_BYTES // (4 * patterns[0].size))
    for low in range(start, stop, rows):
        numbers = np.arange(low, min(low + rows, stop), dtype=np.int64)
        labels = (numbers - start) % len(patterns)
        yield _images(patterns, seed, numbers, labels), labels


def _images(
    patterns: NDArray[np.int32], seed: int, numbers: NDArray[np.int64], labels: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Return the images of these samples: uint8 [n, size, size, 3]."""
    count, size = len(numbers), patterns.shape[1]
    bits = _hash(seed, 1, numbers)
    others = (labels + 1 + _field(bits, 0, len(patterns) - 1)) % len(patterns)
    main = _moved(patterns, labels, _field(bits, 1, size), _field(bits, 2, size))
    more = splitmix64(bits)
    other = _moved(patterns, others, _field(more, 0, size), _field(more, 1, size))
    noise = _random_bytes(seed, 2, numbers, 2 * main[0].size).astype(np.int32)
    # -255..255, in a triangular distribution
    noise = (noise[:, ::2] + noise[:, 1::2] - 255).reshape(main.shape)
    strength = 24 + _field(more, 2, 24).reshape(count, 1, 1, 1)  # of 64
    mixed = 128 + (main * strength + other * 20 + noise * 24) // 64
    images: NDArray[np.uint8] = np.clip(mixed, 0, 255).astype(np.uint8)
    return images


def _moved(
    patterns: NDArray[np.int32],
    chosen: NDArray[np.int64],
    down: NDArray[np.int64],
    across: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Return the chosen patterns, each rolled by its own offsets: [n, size, size, 3]."""
    steps = np.arange(patterns.shape[1])
    rows = (down[:, None] + steps) % len(steps)
    columns = (across[:, None] + steps) % len(steps)
    moved = patterns[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
    return np.asarray(moved, np.int32)


def _field(bits: NDArray[np.uint64], field: int, limit: int) -> NDArray[np.int64]:
    """Return a number from 0 to limit - 1 from 16 bits of each hash, field 0 to 3."""
    part = (bits >> np.uint64(16 * field)) & np.uint64(0xFFFF)
    return ((part * np.uint64(limit)) >> np.uint64(16)).astype(np.int64)


def _hash(seed: int, stream: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return random numbers that no epoch of augmentation with the same seed uses."""
    return sample_hash(seed, 2**40 + stream, numbers)


def _random_bytes(
    seed: int, stream: int, numbers: NDArray[np.int64], length: int
) -> NDArray[np.uint8]:
    """Return `length` random bytes for each of these numbers: uint8 [n, length]."""
    words = np.arange(-(-length // 8), dtype=np.uint64)
    state = splitmix64(_hash(seed, stream, numbers)[:, None] ^ words)
    return state.astype("<u8").view(np.uint8)[:, :length]
