"""The seconds that all-reduces add to a backward, compared with values computed by hand."""

import pytest

from hvdtrain.planner.cost import Part, Sum, exposed_seconds


@pytest.mark.parametrize(
    ("after", "sums", "slowdowns", "expected"),
    [
        ([10], [3.0], (1, 1), 3.0),  # nothing is hidden
        ([4, 10], [3.0, 1.0], (1, 1), 1.0),  # the first is
        ([4, 10], [8.0, 1.0], (1, 1), 3.0),  # the second waits for the first
        # Both half as fast: 3 s of the all-reduce take 6 s, during which the backward does 3 s.
        ([4], [3.0], (2, 2), 3.0),
        # The backward's last second takes 2, which do 1 s of the all-reduce.
        ([9], [3.0], (2, 2), 3.0),
        ([], [], (2, 2), 0.0),
        ([0], [100.0], (1, 1), 90.0),
    ],
)
def test_sums_beside_a_backward_of_equal_parts(
    after: list[int], sums: list[float], slowdowns: tuple[float, float], expected: float
) -> None:
    compute, reduce = slowdowns
    parts = [Part(1.0, compute)] * 10
    assert exposed_seconds(parts, list(map(Sum, after, sums)), reduce) == pytest.approx(expected)


def test_only_the_parts_beside_a_sum_are_slowed_down() -> None:
    parts = [Part(2.0, 9.0), Part(2.0, 3.0), Part(2.0, 1.0), Part(2.0, 9.0)]
    # 4 s of the sum: the second part takes 6 s, not 2, and the sum uses 3 of them; then it uses 1.
    assert exposed_seconds(parts, [Sum(1, 4.0)], 2.0) == pytest.approx(4.0)
    # The first part is slowed down if the sum can start at once, and then no other one.
    assert exposed_seconds(parts, [Sum(0, 9.0)], 2.0) == pytest.approx(16.0)
    # What takes no time hides nothing.
    assert exposed_seconds([*parts, Part(0.0, 5.0)], [Sum(5, 1.0)], 2.0) == pytest.approx(1.0)
