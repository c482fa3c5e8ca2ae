"""Crop and flip equal a naive loop, and depend on (seed, epoch, id) alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from hvdtrain.data.augment import crop_box, crop_flip, resized_crop_flip, sample_hash, splitmix64

Images = NDArray[np.uint8]


def some_images(count: int, height: int = 8, width: int = 6, channels: int = 3) -> Images:
    generator = np.random.default_rng(count)
    return generator.integers(1, 256, (count, height, width, channels), dtype=np.uint8)


def naive_crop_flip(
    images: Images, ids: NDArray[np.int64], seed: int, epoch: int, padding: int = 4
) -> Images:
    result = np.zeros_like(images)
    _, height, width, _ = images.shape
    for i, bits in enumerate(sample_hash(seed, epoch, ids).tolist()):
        top = ((bits & 0xFFFFFF) * (2 * padding + 1)) >> 24
        left = ((bits >> 24 & 0xFFFFFF) * (2 * padding + 1)) >> 24
        sides = ((padding, padding), (padding, padding), (0, 0))
        padded = np.pad(images[i], sides)
        crop = padded[top : top + height, left : left + width]
        mirrored = bits >> 63
        result[i] = crop[:, ::-1] if mirrored else crop
    return result


@given(
    count=st.integers(0, 9),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    channels=st.integers(1, 4),
    seed=st.integers(-5, 2**40),
    epoch=st.integers(0, 1000),
)
def test_it_is_the_obvious_loop(
    count: int, height: int, width: int, channels: int, seed: int, epoch: int
) -> None:
    images = some_images(count, height, width, channels)
    before = images.copy()
    ids = np.arange(count, dtype=np.int64) * 7919
    result = crop_flip(images, ids, seed, epoch)
    assert result.dtype == np.uint8
    assert not np.shares_memory(result, images)
    np.testing.assert_array_equal(result, naive_crop_flip(images, ids, seed, epoch))
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


def test_a_layout_that_is_not_contiguous_makes_no_difference() -> None:
    images, ids = some_images(10), np.arange(10, dtype=np.int64)
    strange = np.asfortranarray(images)
    expected = crop_flip(images, ids, 0, 0)
    np.testing.assert_array_equal(crop_flip(strange, ids, 0, 0), expected)


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
