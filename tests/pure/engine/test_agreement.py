"""Comparison of what ranks have, and notes of a world of one."""

import pytest

from hvdtrain.engine.agreement import Agreement, Note, check_alike, check_digests
from hvdtrain.errors import CheckFailed, UsageError
from hvdtrain.world import World


def test_digests_of_ranks_that_hold_parts_are_joined() -> None:
    parts = [{"first": 1}, {"first": 1, "second": 2}, {"third": 3}]
    assert check_digests(parts, "") == {"first": 1, "second": 2, "third": 3}


def test_a_digest_that_differs_names_the_tensor_and_both_ranks() -> None:
    parts = [{"first": 1}, {"second": 2, "third": 3}, {"first": 1, "second": 4, "third": 5}]
    with pytest.raises(CheckFailed) as caught:
        check_digests(parts, ": fix it")
    text = "rank 2 and rank 1 hold different values of second and 1 more: fix it"
    assert str(caught.value) == text


def test_facts_that_differ_name_the_rank_and_both_values() -> None:
    same = {"model": {"weight": "3 x 3"}, "optimizer": {"lr": "0.1"}}
    other = {"model": {"weight": "3 x 3"}, "optimizer": {"lr": "0.2", "momentum": "0"}}
    check_alike([same, same], "")
    with pytest.raises(UsageError) as caught:
        check_alike([same, same, other], "use the same")
    assert str(caught.value) == (
        "rank 2 has another optimizer than rank 0: lr is 0.2 there and 0.1 on rank 0 (and 1 more)"
        ": use the same"
    )


def test_one_rank_agrees_with_itself() -> None:
    agreement = Agreement(World("none", 0, 1, 0, 1, 1), "")
    (note,) = agreement.exchange("evaluating", samples=3)
    assert note == Note(note.action, samples=3)
    assert agreement.gather("adding up", 2.5) == [2.5]
