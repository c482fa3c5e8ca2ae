"""A profile adapts to the times of components during training."""

import pytest

from hvdtrain.plan.plan import replicated
from hvdtrain.planner.adapt import (
    MOST_DIFFERENCE,
    Watch,
    changed_component,
    compared,
    following,
    predicted_components,
)
from tests.pure.planner.machines import question


def test_what_takes_as_long_as_predicted_stays_as_it_is() -> None:
    machine = question()
    plan = replicated(list(machine.known.profile.names), 2, 1, None)
    measured = [predicted_components(machine, plan, rank) for rank in plan.ranks]
    ratios = compared(machine, plan, measured)
    assert all(
        ratio == pytest.approx(1) for rank_ratios in ratios for ratio in rank_ratios.values()
    )
    again = following(machine, ratios)
    assert [predicted_components(again, plan, rank) for rank in plan.ranks] == measured


def test_a_component_is_followed_beside_the_others_of_its_rank() -> None:
    """The whole rank is three times slower, which does not count here."""
    machine = question()
    names = list(machine.known.profile.names)
    plan = replicated(names, 2, 1, None)
    before = predicted_components(machine, plan, 0)
    measured = [{name: 3 * seconds for name, seconds in before.items()} for _ in plan.ranks]
    measured[0][names[0]] *= 1.5
    adapted = following(machine, compared(machine, plan, measured))
    first, second = (predicted_components(adapted, plan, rank) for rank in plan.ranks)
    assert first[names[0]] == pytest.approx(1.5 * before[names[0]])
    assert {n: first[n] for n in names[1:]} == pytest.approx({n: before[n] for n in names[1:]})
    assert second == pytest.approx(before)


def test_what_a_rank_does_not_hold_is_known_from_others_and_disturbances_are_bounded() -> None:
    machine = question()
    names = list(machine.known.profile.names)
    plan = replicated(names, 2, 1, None)
    before = predicted_components(machine, plan, 1)
    ratios = [{names[0]: 100.0, names[1]: 1.0, names[2]: 1.0}, {}]
    after = predicted_components(following(machine, ratios), plan, 1)
    assert after[names[0]] == pytest.approx(MOST_DIFFERENCE * before[names[0]])
    assert after[names[1]] == before[names[1]]
    assert after[names[3]] == before[names[3]]


def test_a_component_that_changed_against_the_others_of_its_rank_is_named() -> None:
    """All of rank 1 is slower, by nearly the same factor."""
    slower = {"stem": 3.0, "body": 3.2, "head": 3.4}
    assert changed_component([{"stem": 1.0, "body": 1.1, "head": 0.9}, slower]) is None
    assert changed_component([{"stem": 1.0, "body": 1.0, "head": 0.5}, slower]) == (0, "head", 0.5)
    rank, name, ratio = changed_component([{}, slower | {"stem": 4.8}]) or (0, "", 0.0)
    assert (rank, name) == (1, "stem")
    assert ratio == pytest.approx(4.8 / 3.4)
    assert changed_component([{}, {"alone": 9.0}, {"stem": 0.0}]) is None
    # Both are as far from their median, and one of them takes as long as before.
    assert (changed_component([{"stem": 1.0, "head": 2.0}]) or ("", ""))[1] == "head"
    assert (changed_component([{"stem": 1.0, "head": 6.0}, {}]) or ("", ""))[1] == "head"


def test_a_profile_that_has_followed_is_not_changed_again() -> None:
    machine = question()
    names = list(machine.known.profile.names)
    plan = replicated(names, 2, 1, None)
    measured = [predicted_components(machine, plan, rank) for rank in plan.ranks]
    measured[0][names[2]] *= 1.7
    ratios = compared(machine, plan, measured)
    assert (changed_component(ratios) or (0, ""))[1] == names[2]
    assert changed_component(compared(following(machine, ratios), plan, measured)) is None


def test_a_component_that_changed_once_may_be_chance() -> None:
    watch, usual = Watch(), [{"stem": 1.0, "body": 1.0, "head": 1.0}]
    slow, fast = ([usual[0] | {"head": value}] for value in (3.0, 0.4))
    once = [slow, usual, slow, fast, slow]
    assert [watch.change_of_a_component(one) for one in once] == [None] * 5
    assert watch.changed == (0, "head", True)
    drift = watch.change_of_a_component(slow)
    assert drift is not None
    assert drift.is_of_a_component
    assert drift.cause.startswith("head on rank 0 is 3.00x slower, beside its other components")
    assert watch.change_of_a_component(slow) is None, "it was reported"
