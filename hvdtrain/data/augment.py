"""Augmentation of samples, which depends on (seed, epoch, sample id) alone.

It is therefore the same on any rank, in any batch and after a resume. The random numbers are
SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014)
used as a hash of a counter.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from PIL.Image import Image

from hvdtrain.data.images import scaled

PADDING = 4  # pixels, of crop_flip
_ATTEMPTS = 10  # to place a random crop
_SMALLEST_AREA = 0.08  # of a random crop, relative to the image
# Aspect ratios from 3/4 to 4/3 whose logarithms are evenly spaced. They are rounded to 16 bits, so
# that no machine's mathematical library makes a difference.
_RATIOS = tuple(
    round(math.exp(math.log(3 / 4) + step / 255 * math.log(16 / 9)) * 2**16) / 2**16
    for step in range(256)
)
_FIELD = 2**16
_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def splitmix64(counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return one random 64-bit number per counter, in an array of the same shape."""
    z = counter + np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample_hash(seed: int, epoch: int, ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return one random 64-bit number per sample: uint64 [n]."""
    state = np.array([seed & _MASK], np.uint64)
    state = splitmix64(splitmix64(state) ^ np.array([epoch & _MASK], np.uint64))
    return splitmix64(state ^ ids.astype(np.uint64))


class Moves(NamedTuple):
    """The shift of each image, and which ones are mirrored afterwards.

    Attributes:
        top, left: first pixel of the crop from the padded image: int64 [n].
        mirrored: bool [n].
    """

    top: NDArray[np.intp]
    left: NDArray[np.intp]
    mirrored: NDArray[np.bool_]

    def part(self, part: slice) -> "Moves":
        """Return those of some of the images."""
        return Moves(self.top[part], self.left[part], self.mirrored[part])


def moves(ids: NDArray[np.int64], seed: int, epoch: int) -> Moves:
    """Return what `crop_flip` does to the images with these ids."""
    places = 2 * PADDING + 1
    bits = sample_hash(seed, epoch, ids)
    top = _below(places, bits & np.uint64(0xFFFFFF))
    left = _below(places, (bits >> np.uint64(24)) & np.uint64(0xFFFFFF))
    return Moves(top, left, (bits >> np.uint64(63)).astype(bool))


def crop_flip(
    images: NDArray[np.uint8], ids: NDArray[np.int64], seed: int, epoch: int
) -> NDArray[np.uint8]:
    """Return the images shifted by up to PADDING pixels each way, half of them mirrored.

    `images` is uint8 [n, height, width, channels]; a new array of that shape is returned. This is
    the augmentation of He et al. (2016) for CIFAR: pad by 4 zeros, crop at random, flip.
    """
    count, height, width, channels = images.shape
    if count == 0:
        return images.copy()
    places = 2 * PADDING + 1
    top, left, mirrored = moves(ids, seed, epoch)
    padded = np.pad(images, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    padded = np.ascontiguousarray(padded)  # it has the order of the images' axes in memory
    # lines[i, y, x] is the line of `width` pixels that starts at (y, x) of image i, as one item:
    # a crop is then a gather of `height` items, each copied as a block.
    line = np.dtype((np.void, width * channels))
    lines = as_strided(
        padded.reshape(-1)[: width * channels].view(line),
        (count, height + 2 * PADDING, places),
        (padded.strides[0], padded.strides[1], padded.strides[2]),
    )
    rows = top[:, None] + np.arange(height)
    cropped = lines[np.arange(count)[:, None], rows, left[:, None]]
    result: NDArray[np.uint8] = cropped.view(np.uint8).reshape(images.shape)
    pixels = result.view(np.dtype((np.void, channels)))[..., 0]
    pixels[mirrored] = pixels[mirrored, :, ::-1]
    return result


def resized_crop_flip(
    image: Image, sample: int, seed: int, epoch: int, size: int
) -> NDArray[np.uint8]:
    """Return a random part of an RGB image, scaled to a square and mirrored half of the time.

    The result is uint8 [size, size, 3]. The part has 8 % to 100 % of the area and an aspect ratio
    of 3/4 to 4/3 (Szegedy et al., arXiv 1409.4842, in the form of torchvision). The scaling is
    that of `resize`.
    """
    ids = np.array([sample], np.int64)
    bits = sample_hash(seed, epoch, ids)
    box = crop_box(image.height, image.width, bits)
    result = scaled(image, size, size, box)
    turned = bool(splitmix64(bits ^ np.uint64(_FIELD))[0] >> np.uint64(63))
    return np.ascontiguousarray(result[:, ::-1]) if turned else result


def crop_box(height: int, width: int, bits: NDArray[np.uint64]) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a random part of an image, from 64 random bits.

    Parts that do not fit are drawn again. After _ATTEMPTS of them, the largest central part with
    an allowed aspect ratio is returned.
    """
    for _ in range(_ATTEMPTS):
        bits = splitmix64(bits)
        number = int(bits[0])
        area, ratio, across, down = (number >> 16 * field & 0xFFFF for field in range(4))
        share = _SMALLEST_AREA + (1 - _SMALLEST_AREA) * area / (_FIELD - 1)
        aspect = _RATIOS[ratio >> 8]
        part_width = round(math.sqrt(height * width * share * aspect))
        part_height = round(math.sqrt(height * width * share / aspect))
        if 0 < part_width <= width and 0 < part_height <= height:
            left = across * (width - part_width + 1) // _FIELD
            top = down * (height - part_height + 1) // _FIELD
            return left, top, left + part_width, top + part_height
    part_width = min(width, max(1, round(height * _RATIOS[-1])))
    part_height = min(height, max(1, round(width / _RATIOS[0])))
    left, top = (width - part_width) // 2, (height - part_height) // 2
    return left, top, left + part_width, top + part_height


@dataclass(frozen=True)
class Places:
    """Images of a split that is in the memory of a device, and what is done to them there.

    Attributes:
        rows: of the split, int64 [n].
        moves: of each image; None: they are used as they are.
    """

    rows: NDArray[np.int64]
    moves: Moves | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> "Places":
        return replace(
            self,
            rows=self.rows[part],
            moves=None if self.moves is None else self.moves.part(part),
        )


def _below(limit: int, bits: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Return numbers from 0 to limit - 1 with equal probability, from 24 random bits."""
    return ((bits * np.uint64(limit)) >> np.uint64(24)).astype(np.intp)
