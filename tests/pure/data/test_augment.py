"""Crop and flip equal a naive loop, and depend on (seed, epoch, id) alone."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from hvdtrain.data.augment import (
    Border,
    Flip,
    alternates,
    crop_box,
    crop_flip,
    cutout,
    resized_crop_flip,
    sample_hash,
    splitmix64,
)

Images = NDArray[np.uint8]


def some_images(count: int, height: int = 8, width: int = 6, channels: int = 3) -> Images:
    generator = np.random.default_rng(count)
    return generator.integers(1, 256, (count, height, width, channels), dtype=np.uint8)


def naive_crop_flip(
    images: Images,
    ids: NDArray[np.int64],
    seed: int,
    epoch: int,
    padding: int,
    border: Border = "zeros",
    flip: Flip = "random",
) -> Images:
    result = np.zeros_like(images)
    _, height, width, _ = images.shape
    for i, bits in enumerate(sample_hash(seed, epoch, ids).tolist()):
        top = ((bits & 0xFFFFFF) * (2 * padding + 1)) >> 24
        left = ((bits >> 24 & 0xFFFFFF) * (2 * padding + 1)) >> 24
        sides = ((padding, padding), (padding, padding), (0, 0))
        padded = np.pad(images[i], sides, "constant" if border == "zeros" else "reflect")
        crop = padded[top : top + height, left : left + width]
        mirrored = bits >> 63
        if flip == "alternate":
            start = int(sample_hash(seed, 0, ids[i : i + 1])[0]) >> 63
            mirrored = (start + epoch) % 2
        result[i] = crop[:, ::-1] if mirrored else crop
    return result


@given(
    count=st.integers(0, 9),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    channels=st.integers(1, 4),
    padding=st.integers(0, 5),
    seed=st.integers(-5, 2**40),
    epoch=st.integers(0, 1000),
    border=st.sampled_from(["zeros", "reflect"]),
    flip=st.sampled_from(["random", "alternate"]),
)
def test_it_is_the_obvious_loop(
    count: int,
    height: int,
    width: int,
    channels: int,
    padding: int,
    seed: int,
    epoch: int,
    border: Border,
    flip: Flip,
) -> None:
    images = some_images(count, height, width, channels)
    before = images.copy()
    ids = np.arange(count, dtype=np.int64) * 7919
    how = padding, border, flip
    result = crop_flip(images, ids, seed, epoch, *how)
    assert result.dtype == np.uint8
    assert not np.shares_memory(result, images)
    np.testing.assert_array_equal(result, naive_crop_flip(images, ids, seed, epoch, *how))
    np.testing.assert_array_equal(images, before)


def test_a_sample_is_the_same_in_any_batch() -> None:
    images, ids = some_images(40), np.arange(40, dtype=np.int64)
    whole = crop_flip(images, ids, seed=1, epoch=2)
    backwards = crop_flip(images[::-1], ids[::-1], seed=1, epoch=2)
    np.testing.assert_array_equal(backwards[::-1], whole)
    np.testing.assert_array_equal(crop_flip(images[7:9], ids[7:9], seed=1, epoch=2), whole[7:9])


def test_seed_epoch_and_id_each_change_it() -> None:
    images, ids = some_images(64), np.arange(64, dtype=np.int64)
    reference = crop_flip(images, ids, seed=1, epoch=2)
    assert (crop_flip(images, ids, seed=2, epoch=2) != reference).any()
    assert (crop_flip(images, ids, seed=1, epoch=3) != reference).any()
    assert (crop_flip(images, ids + 64, seed=1, epoch=2) != reference).any()


def test_shifts_and_flips_are_spread_evenly() -> None:
    """One bright pixel shows the shift and flip of each of 20,000 images.

    There are 81 shifts and two directions, with about 123 images each (standard deviation 11).
    """
    count = 20_000
    images = np.zeros((count, 15, 15, 1), np.uint8)
    images[:, 7, 5] = 255
    moved = crop_flip(images, np.arange(count, dtype=np.int64), seed=0, epoch=0)
    assert (moved.reshape(count, -1) == 255).sum(axis=1).tolist() == [1] * count
    rows, columns = np.divmod(moved.reshape(count, -1).argmax(axis=1), 15)
    assert set(rows.tolist()) == set(range(3, 12))
    # Columns 1..9 unmirrored, 13..5 mirrored: those below 5 and above 9 are unambiguous.
    assert set(columns.tolist()) == set(range(1, 14))
    seen = np.bincount(rows * 15 + columns)
    certain = seen.reshape(-1)[seen > 0]
    assert certain.min() > 70
    assert certain.max() < 340
    assert abs((columns < 5).sum() / (columns > 9).sum() - 1) < 0.1


def test_the_hash_is_splitmix64() -> None:
    """The first numbers of the published generator from seed 1234567."""
    gamma = 0x9E3779B97F4A7C15
    counters = np.array([(1234567 + k * gamma) % 2**64 for k in range(3)], np.uint64)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(counters).tolist() == published


@pytest.mark.parametrize("padding", [0, 4])
def test_a_layout_that_is_not_contiguous_makes_no_difference(padding: int) -> None:
    images, ids = some_images(10), np.arange(10, dtype=np.int64)
    strange = np.asfortranarray(images)
    expected = crop_flip(images, ids, 0, 0, padding)
    np.testing.assert_array_equal(crop_flip(strange, ids, 0, 0, padding), expected)


def naive_cutout(
    images: Images, ids: NDArray[np.int64], seed: int, epoch: int, side: int, fill: Images
) -> Images:
    result = images.copy()
    _, height, width, _ = images.shape
    for i, bits in enumerate(splitmix64(sample_hash(seed, epoch, ids)).tolist()):
        top = (((bits & 0xFFFFFF) * height) >> 24) - side // 2
        left = (((bits >> 24 & 0xFFFFFF) * width) >> 24) - side // 2
        for y in range(max(0, top), min(height, top + side)):
            for x in range(max(0, left), min(width, left + side)):
                result[i, y, x] = fill
    return result


@given(
    count=st.integers(0, 5),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    side=st.integers(1, 12),
    seed=st.integers(0, 2**40),
)
def test_cutout_is_the_obvious_loop(
    count: int, height: int, width: int, side: int, seed: int
) -> None:
    images, ids = some_images(count, height, width), np.arange(count, dtype=np.int64) * 7919
    fill = np.array([7, 8, 9], np.uint8)
    expected = naive_cutout(images, ids, seed, 3, side, fill)
    cutout(images, ids, seed, 3, side, fill)
    np.testing.assert_array_equal(images, expected)


def test_the_centre_of_a_cutout_is_any_pixel_and_not_that_of_the_crop() -> None:
    count = 20_000
    ids = np.arange(count, dtype=np.int64)
    images = np.zeros((count, 6, 5, 1), np.uint8)
    cutout(images, ids, 0, 0, 1, np.array([255], np.uint8))
    places = images.reshape(count, -1).argmax(axis=1)
    counts = np.bincount(places, minlength=30)
    assert counts.min() > 560, "667 each are expected, standard deviation 25"
    assert counts.max() < 780
    shifts = crop_flip(np.full((count, 6, 5, 1), 1, np.uint8), ids, 0, 0)[:, 0].any(axis=(1, 2))
    assert abs(np.corrcoef(shifts, places // 5)[0, 1]) < 0.03


def a_photo(height: int = 60, width: int = 90) -> Image.Image:
    rows, columns = np.mgrid[:height, :width]
    planes = [rows * 255 // height, columns * 255 // width, 0 * rows]
    return Image.fromarray(np.stack(planes, axis=2).astype(np.uint8))


def test_a_resized_crop_depends_on_seed_epoch_and_sample_alone() -> None:
    photo = a_photo()
    first = resized_crop_flip(photo, 7, 1, 2, 24)
    assert first.shape == (24, 24, 3)
    np.testing.assert_array_equal(first, resized_crop_flip(photo.copy(), 7, 1, 2, 24))
    for other in ((8, 1, 2), (7, 2, 2), (7, 1, 3)):
        assert not np.array_equal(first, resized_crop_flip(photo, *other, 24))


def plain_parts(height: int, width: int) -> np.ndarray:
    """Return heights and widths of random parts, drawn in the plainest way."""
    random = np.random.default_rng(0)
    area = height * width * random.uniform(0.08, 1, 100_000)
    ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3), 100_000))
    parts = np.round(np.stack([np.sqrt(area / ratio), np.sqrt(area * ratio)], axis=1))
    return np.asarray(parts[(parts <= (height, width)).all(axis=1)])


def test_random_parts_have_the_areas_and_shapes_of_the_publication() -> None:
    height, width = 300, 400
    boxes = np.array(
        [crop_box(height, width, sample_hash(0, 0, np.array([n]))) for n in range(3000)]
    )
    left, top, right, bottom = boxes.T
    assert left.min() >= 0
    assert top.min() >= 0
    assert right.max() <= width
    assert bottom.max() <= height
    areas = (right - left) * (bottom - top) / (height * width)
    ratios = (right - left) / (bottom - top)
    assert 0.078 < areas.min() < 0.09
    assert 0.95 < areas.max() <= 1
    expected = plain_parts(height, width)
    assert abs(areas.mean() - expected.prod(axis=1).mean() / (height * width)) < 0.015
    assert abs(np.log(ratios).mean() - np.log(expected[:, 1] / expected[:, 0]).mean()) < 0.015
    assert abs(np.log(ratios)).max() < np.log(4 / 3) + 0.02
    # The first and the last place are as likely as any other.
    assert {left.min(), top.min()} == {0}
    assert (right == width).any()
    assert (bottom == height).any()


def test_half_of_the_crops_are_mirrored_and_none_depends_on_its_box() -> None:
    photo = a_photo()
    mirrored = [
        crop[0, 0, 1] > crop[0, -1, 1]
        for crop in (resized_crop_flip(photo, n, 0, 0, 8).astype(int) for n in range(600))
    ]
    assert 250 < sum(mirrored) < 350


def test_a_part_of_an_odd_image_is_its_largest_with_an_allowed_shape() -> None:
    bits = sample_hash(0, 0, np.array([3]))
    assert crop_box(2, 1000, bits) == (498, 0, 501, 2)
    assert crop_box(1000, 3, bits) == (0, 498, 3, 502)


def test_alternating_flips_turn_every_image_in_every_epoch() -> None:
    ids = np.arange(4000, dtype=np.int64)
    by_epoch = [alternates(ids, 3, epoch) for epoch in range(4)]
    assert abs(by_epoch[0].mean() - 0.5) < 0.03
    for before, after in pairwise(by_epoch):
        np.testing.assert_array_equal(after, ~before)
    photo = Image.fromarray(some_images(1, 9, 9)[0])
    for epoch in range(2):
        turned = resized_crop_flip(photo, 5, 3, epoch, 8, "alternate")
        plain = resized_crop_flip(photo, 5, 3, epoch, 8)
        is_same = np.array_equal(turned, plain)
        assert is_same or np.array_equal(turned[:, ::-1], plain)
