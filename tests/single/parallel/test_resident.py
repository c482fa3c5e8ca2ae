"""Images that a device takes from a resident split are those that the host makes, to the bit."""

from itertools import product

import numpy as np
import pytest
import torch

from hvdtrain.data.augment import Border, Flip, Places, crop_flip, cutout, moves, squares
from hvdtrain.parallel.resident import Resident

COUNT, SEED, EPOCH = 40, 5, 3


@pytest.mark.proves(
    "Images that a device takes from a resident split are those of the host, to the bit, "
    "and so is what is trained on them."
)
@pytest.mark.parametrize(
    ("border", "flip", "padding", "side", "shape"),
    list(
        product(
            ("zeros", "reflect"),
            ("random", "alternate"),
            (0, 2, 4),
            (None, 1, 5),
            ((9, 9, 3), (8, 11, 1)),
        )
    ),
)
def test_images_are_those_of_the_host(
    border: Border, flip: Flip, padding: int, side: int | None, shape: tuple[int, int, int]
) -> None:
    random = np.random.default_rng(0)
    stored = random.integers(0, 256, (COUNT, *shape), np.uint8)
    rows = random.permutation(COUNT)[:17]
    ids = 1000 + 3 * rows
    fill = np.arange(1, 1 + shape[2], dtype=np.uint8)
    resident = Resident(
        torch.from_numpy(stored), padding, border, side or 0, torch.from_numpy(fill)
    )
    made = crop_flip(stored[rows], ids, SEED, EPOCH, padding, border, flip)
    blanked = None
    if side is not None:
        cutout(made, ids, SEED, EPOCH, side, fill)
        blanked = squares(ids, SEED, EPOCH, side, shape[:2])
    places = Places(rows, moves(ids, SEED, EPOCH, padding, flip), blanked)
    pixels = resident.take(places)
    assert pixels.dtype == torch.uint8
    assert np.array_equal(pixels.numpy(), made)
    part = places[slice(3, 9)]
    assert len(part) == 6
    assert np.array_equal(resident.take(part).numpy(), made[3:9])


def test_images_without_augmentation_are_the_stored_ones() -> None:
    stored = np.arange(5 * 4 * 4 * 3, dtype=np.uint8).reshape(5, 4, 4, 3)
    resident = Resident(torch.from_numpy(stored), 4, "zeros", 0, torch.zeros(3, dtype=torch.uint8))
    rows = np.array([4, 0, 0])
    assert np.array_equal(resident.take(Places(rows)).numpy(), stored[rows])
    assert resident.take(Places(rows[:0])).shape == (0, 4, 4, 3)
