"""The faults that `--inject` accepts, and the refusal of everything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.options.requests import FAULTS, Fault, parse_faults


@pytest.mark.proves("`--inject` injects each fault of its table, and refuses what cannot happen.")
def test_faults_are_read_one_by_one() -> None:
    assert parse_faults("kill step=20 rank=1; slow step=5 seconds=0.25 steps=3", ranks=2) == (
        Fault("kill", 20, 1),
        Fault("slow", 5, 0, steps=3, seconds=0.25),
    )
    assert parse_faults("nan step=7 component=layer1.0", 1) == (
        Fault("nan", 7, None, component="layer1.0"),
    )
    assert parse_faults("nan step=7", 1) == (Fault("nan", 7, 0),)


def test_a_seed_decides_the_step_and_the_rank() -> None:
    drawn = {parse_faults(f"kill step=10..50 rank=any seed={seed}", 4)[0] for seed in range(50)}
    assert {fault.rank for fault in drawn} == {0, 1, 2, 3}
    assert len({fault.step for fault in drawn}) > 15
    assert all(10 <= fault.step <= 50 for fault in drawn)
    again = parse_faults("kill step=10..50 rank=any seed=7", 4)
    assert again == parse_faults("kill step=10..50 rank=any seed=7", 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "KIND is kill, segfault"),
        ("die step=3", "KIND is kill, segfault"),
        ("kill", "needs step=N"),
        ("kill rank=1", "needs step=N"),
        ("kill step=3 seconds=1", "kill takes step, rank or seed"),
        ("kill step=0", "'0' is not a whole number of at least 1"),
        ("kill step=-1", "'-1' is not a whole number of at least 1"),
        ("kill step=1e9", "'1e9' is not a whole number"),
        ("kill step=3 rank=2", "rank 2 does not exist, use 0 to 1"),
        ("kill step=3 rank", "is not understood"),
        ("slow step=3 seconds=inf", "'inf' is not a duration in seconds"),
        ("replan step=3 rank=1", "all ranks change the plan: leave out rank="),
        ("kill step=3;", "KIND is kill, segfault"),
    ],
)
def test_anything_else_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_faults(text, ranks=2)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


WORDS = st.sampled_from(
    [*FAULTS, "step", "rank", "seed", "=", "..", "any", "1", "-1", "9" * 30, ";", " ", "\0", "x"]
)


@given(st.lists(WORDS, max_size=12).map("".join) | st.text(max_size=40), st.integers(1, 8))
def test_a_text_is_faults_of_these_ranks_or_an_error_of_ours(text: str, ranks: int) -> None:
    try:
        faults = parse_faults(text, ranks)
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert all(fault.kind in FAULTS and 0 <= (fault.rank or 0) < ranks for fault in faults)
        assert all(fault.step > 0 for fault in faults)
