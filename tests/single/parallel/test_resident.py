"""Images that a device takes from a resident split are those that the host makes, to the bit."""

import numpy as np
import pytest
import torch

from hvdtrain.data.augment import Places, crop_flip, moves
from hvdtrain.parallel.stage import Resident

COUNT, SEED, EPOCH = 40, 5, 3


@pytest.mark.proves(
    "Images that a device takes from a resident split are those of the host, to the bit, "
    "and so is what is trained on them."
)
@pytest.mark.parametrize("shape", [(9, 9, 3), (8, 11, 1), (2, 3, 3)])
def test_images_are_those_of_the_host(shape: tuple[int, int, int]) -> None:
    random = np.random.default_rng(0)
    stored = random.integers(0, 256, (COUNT, *shape), np.uint8)
    rows = random.permutation(COUNT)[:17]
    ids = 1000 + 3 * rows
    resident = Resident(torch.from_numpy(stored))
    made = crop_flip(stored[rows], ids, SEED, EPOCH)
    places = Places(rows, moves(ids, SEED, EPOCH))
    pixels = resident.take(places)
    assert pixels.dtype == torch.uint8
    assert np.array_equal(pixels.numpy(), made)
    part = places[slice(3, 9)]
    assert len(part) == 6
    assert np.array_equal(resident.take(part).numpy(), made[3:9])


def test_images_without_augmentation_are_the_stored_ones() -> None:
    stored = np.arange(5 * 4 * 4 * 3, dtype=np.uint8).reshape(5, 4, 4, 3)
    resident = Resident(torch.from_numpy(stored))
    rows = np.array([4, 0, 0])
    assert np.array_equal(resident.take(Places(rows)).numpy(), stored[rows])
    assert resident.take(Places(rows[:0])).shape == (0, 4, 4, 3)
