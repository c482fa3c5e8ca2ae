"""The views of a test image."""

import numpy as np
import pytest

from hvdtrain.data.views import View, views


@pytest.mark.parametrize(("name", "count"), [("none", 1), ("flip", 2), ("flip-shift", 6)])
def test_weights_add_up_to_one_and_mirror_images_weigh_the_same(name: str, count: int) -> None:
    seen = views(name)
    assert len(set(seen)) == len(seen) == count
    assert sum(view.weight for view in seen) == 1
    by_side = [sum(v.weight for v in seen if v.is_mirrored is side) for side in (False, True)]
    assert count == 1 or by_side == [0.5, 0.5]


@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("is_mirrored", [False, True])
def test_a_view_is_a_crop_of_the_image_with_a_reflected_border(
    shift: int, is_mirrored: bool
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), dtype=np.uint8)
    before = images.copy()
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), "reflect")
    expected = padded[:, 2 - shift : 7 - shift, 2 - shift : 9 - shift]
    expected = expected[:, :, ::-1] if is_mirrored else expected
    seen = View(1.0, is_mirrored, shift).of(images)
    np.testing.assert_array_equal(seen, expected)
    assert seen.flags.c_contiguous
    np.testing.assert_array_equal(images, before)
