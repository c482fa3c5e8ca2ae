"""A profile that follows what components show while training."""

import pytest

from hvdtrain.parallel.plan import replicated
from hvdtrain.planner.follow import MOST, compared, following, predicted_components
from tests.pure.planner.machines import question


def test_what_takes_as_long_as_predicted_stays_as_it_is() -> None:
    asked = question()
    plan = replicated(list(asked.known.profile.names), 2, 1, None)
    taken = [predicted_components(asked, plan, rank) for rank in plan.ranks]
    ratios = compared(asked, plan, taken)
    assert all(ratio == pytest.approx(1) for own in ratios for ratio in own.values())
    again = following(asked, ratios)
    assert [predicted_components(again, plan, rank) for rank in plan.ranks] == taken


def test_a_component_is_followed_beside_the_others_of_its_rank() -> None:
    """The rank as a whole is three times as slow: that is for another place to say."""
    asked = question()
    names = list(asked.known.profile.names)
    plan = replicated(names, 2, 1, None)
    before = predicted_components(asked, plan, 0)
    taken = [{name: 3 * each for name, each in before.items()} for _ in plan.ranks]
    taken[0][names[0]] *= 1.5
    found = following(asked, compared(asked, plan, taken))
    first, second = (predicted_components(found, plan, rank) for rank in plan.ranks)
    assert first[names[0]] == pytest.approx(1.5 * before[names[0]])
    assert {n: first[n] for n in names[1:]} == pytest.approx({n: before[n] for n in names[1:]})
    assert second == pytest.approx(before)


def test_what_a_rank_does_not_hold_is_known_from_others_and_disturbances_are_bounded() -> None:
    asked = question()
    names = list(asked.known.profile.names)
    plan = replicated(names, 2, 1, None)
    before = predicted_components(asked, plan, 1)
    ratios = [{names[0]: 100.0, names[1]: 1.0, names[2]: 1.0}, {}]
    after = predicted_components(following(asked, ratios), plan, 1)
    assert after[names[0]] == pytest.approx(MOST * before[names[0]])
    assert after[names[1]] == before[names[1]]
    assert after[names[3]] == before[names[3]]
