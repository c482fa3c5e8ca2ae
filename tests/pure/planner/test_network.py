"""A measured network with links that are slower than the others."""

from dataclasses import replace

import pytest

from hvdtrain.planner.cost import Question
from hvdtrain.planner.divide import Tables
from hvdtrain.planner.network import Curve, Line, MeasuredNetwork
from hvdtrain.planner.probe import rounds_of
from hvdtrain.planner.profile import Profile
from tests.pure.planner.machines import component, known, network

RANKS, LATENCY, PER_BYTE = 4, 1e-5, 1e-9
PAIRS = [(first, second) for second in range(RANKS) for first in range(second)]


def link(slowness: float) -> Curve:
    line = Line(LATENCY, slowness * PER_BYTE)
    return Curve.of((2**10, 2**20), (line.fixed + size * line.per_unit for size in (2**10, 2**20)))


def measured(**slowness: float) -> MeasuredNetwork:
    """Return a network with links measured again: `r0r1=10` is the one of the ranks 0 and 1."""
    links = {pair: link(slowness.get(f"r{pair[0]}r{pair[1]}", 1.0)) for pair in PAIRS}
    return network(RANKS, LATENCY, PER_BYTE, PER_BYTE).with_links(links)


def test_a_network_whose_links_are_as_measured_or_all_slower_has_no_slow_link() -> None:
    assert not measured().slow_links
    slower = measured(**{f"r{first}r{second}": 5.0 for first, second in PAIRS})
    assert not slower.slow_links
    size = 4e8
    for ranks in ((0, 1), (2, 3)):
        sent = measured().send_seconds(*ranks, size)
        summed = measured().reduce_seconds(ranks, size)
        assert slower.send_seconds(*ranks, size) == pytest.approx(5 * sent, rel=0.02)
        assert slower.reduce_seconds(ranks, size) == pytest.approx(5 * summed, rel=0.02)


def test_transfers_on_a_slow_link_take_longer_in_both_directions() -> None:
    slow = measured(r0r2=10)
    assert list(slow.slow_links) == [(0, 2)]
    size = 10**7
    usual, slower = LATENCY + size * PER_BYTE, LATENCY + 10 * size * PER_BYTE
    for pair in PAIRS:
        expected = slower if pair == (0, 2) else usual
        assert slow.send_seconds(*pair, size) == pytest.approx(expected)
        assert slow.send_seconds(*pair[::-1], size) == pytest.approx(expected)
    assert slow.scaled(3).send_seconds(2, 0, size) == pytest.approx(3 * slower)


def test_an_all_reduce_is_slowed_by_neighbours_in_the_ring_only() -> None:
    size = 4e9
    before = measured()
    for pair, groups in {
        "r0r1": {(0, 1): True, (0, 1, 2, 3): True, (0, 2): False, (2, 3): False, (0, 1, 2): True},
        "r0r2": {(0, 1): False, (0, 1, 2, 3): False, (0, 2): True, (0, 1, 2): True},
        "r0r3": {(0, 1, 2, 3): True, (0, 3): True, (1, 2, 3): False},
    }.items():
        slow = measured(**{pair: 10})
        for group, is_slower in groups.items():
            ratio = slow.reduce_seconds(group, size) / before.reduce_seconds(group, size)
            assert ratio == pytest.approx(10 if is_slower else 1, rel=1e-3), (pair, group)


def test_a_link_that_is_as_fast_as_the_others_again_is_forgotten() -> None:
    again = measured(r0r1=10).with_links({pair: link(1.0) for pair in PAIRS})
    assert not again.slow_links


def test_ranks_that_are_alike_on_unlike_links_have_times_of_their_own() -> None:
    """A stage behind a slow link takes longer than one behind another link."""
    costs = [component(number, output_bytes=10**6) for number in range(4)]
    for slowness, is_slower in ((1.0, False), (10.0, True)):
        ranks = known(costs, [1e-6] * 4, [1.0], measured(r0r1=slowness))
        alike = replace(ranks, profile=Profile(ranks.profile.ranks * RANKS))
        tables = Tables(Question(alike, 32, "sgd"))
        behind, elsewhere = (tables.times_of(2, first, 1).passing[1, 2] for first in (1, 3))
        assert (behind > 2 * elsewhere) == is_slower
        assert (behind == elsewhere) != is_slower


@pytest.mark.parametrize("players", [2, 3, 4, 5, 8, 64])
def test_each_two_meet_once_and_nobody_twice_in_a_round(players: int) -> None:
    rounds = rounds_of(players)
    assert len(rounds) == players - 1 + players % 2
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(one, two) for one in range(players) for two in range(one + 1, players)]
    for pairs in rounds:
        everybody = [one for pair in pairs for one in pair]
        assert len(everybody) == len(set(everybody))


def test_little_differences_are_noise() -> None:
    """Two measurements of a link differ by half if ranks share cores."""
    noisy = measured(r0r1=1.6, r0r2=0.7, r1r3=1.4)
    assert not noisy.slow_links
    assert noisy.send_seconds(0, 3, 10**6) == measured().send_seconds(0, 3, 10**6)
    assert noisy.reduce_seconds((0, 1), 10**6) == measured().reduce_seconds((0, 1), 10**6)
