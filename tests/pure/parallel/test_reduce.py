from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.plan.schedule import group_by_bytes


def test_a_small_model_is_one_bucket_and_a_large_one_several() -> None:
    assert group_by_bytes([4, 4, 4], 100, 100) == [[0, 1, 2]]
    assert group_by_bytes([60, 60, 10, 200, 1], 100, 100) == [[0, 1], [2, 3], [4]]


def test_the_first_bucket_may_be_smaller() -> None:
    assert group_by_bytes([10, 10, 60, 60, 1], 100, 15) == [[0, 1], [2, 3], [4]]


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 120), st.integers(1, 120))
def test_buckets_hold_everything_once_in_order_and_only_the_last_may_be_small(
    sizes: list[int], limit: int, first: int
) -> None:
    groups = group_by_bytes(sizes, limit, first)
    limits = [first] + [limit] * len(groups)
    assert [index for group in groups for index in group] == list(range(len(sizes)))
    grouped = [[sizes[i] for i in group] for group in groups]
    assert all(sum(group) >= most for group, most in zip(grouped[:-1], limits, strict=False))
    assert all(sum(group[:-1]) < most for group, most in zip(grouped, limits, strict=False))
