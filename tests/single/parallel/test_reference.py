"""The serial reference and the runtime cut a batch with separate code: both must agree."""

from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.parallel.reference import reference_cut
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan, Stage

SHARES = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any)


@given(st.lists(SHARES, min_size=1, max_size=3), st.integers(1, 9), st.integers(1, 60))
def test_both_cuts_are_the_same(
    shares: list[list[int]], microbatches: int, batch_size: int
) -> None:
    stages = tuple(
        Stage((f"part{number}",), tuple(range(len(stage))), tuple(stage))
        for number, stage in enumerate(shares)
    )
    plan = Plan(stages, microbatches)
    expected, (slices, parts) = cut(plan, batch_size), reference_cut(plan, batch_size)
    assert [[tuple(ranges) for ranges in stage] for stage in parts] == [
        list(stage.values()) for stage in expected.parts
    ]
    assert len(slices) == expected.microbatches
    for stage in parts:
        rows = [row for k in range(len(slices)) for ranges in stage for row in range(*ranges[k])]
        assert rows == list(range(batch_size))
