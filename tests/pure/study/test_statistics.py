"""Intervals of repeats hold the truth as often as they say, and equivalence is a real test."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from hvdtrain.study.laws import (
    MEDIAN_VARIANCE,
    Estimate,
    _median_variance,
    difference,
    equivalence,
    is_shown,
    median,
    ratio,
)

STUDIES = 1000
COVERAGE = (0.93, 0.97)  # of intervals for 95 %


def holds(estimate: Estimate, truth: float) -> bool:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low <= truth <= estimate.high


def shares_held(repeats: Sequence[int]) -> NDArray[np.float64]:
    """Return how often the intervals of a median, a ratio and a difference hold the truth."""
    draw, held = np.random.default_rng(0), np.zeros(3)
    for _ in range(STUDIES):
        noise = draw.uniform(0.005, 0.05, 2)  # the two samples differ in their noise, too
        count = int(draw.choice(repeats))
        one, two = (
            list(truth * np.exp(spread * draw.normal(size=count)))
            for truth, spread in zip((100, 180), noise, strict=True)
        )
        accuracies = draw.normal([[0.7], [0.71]], 0.004, (2, count))
        held += [
            holds(median(one), 100),
            holds(ratio(two, one), 1.8),
            holds(difference(*map(list, accuracies)), -0.01),
        ]
    return np.asarray(held / STUDIES)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """A percentile bootstrap of three repeats held it in three of four cases."""
    held = shares_held((3, 4, 5, 6))
    assert (held >= COVERAGE[0]).all(), held
    assert (held <= COVERAGE[1]).all(), held


@pytest.mark.parametrize("repeats", [2, 3, 5, 8])
def test_no_number_of_repeats_has_intervals_that_are_too_narrow(repeats: int) -> None:
    held = shares_held((repeats,))
    assert (held >= COVERAGE[0]).all(), held
    assert (held <= 0.985).all(), held  # Welch's are a little too wide for two and three repeats


def test_the_variance_of_a_median_is_that_of_drawn_medians() -> None:
    draw = np.random.default_rng(0)
    for count in (*range(1, len(MEDIAN_VARIANCE) + 5), 30):
        medians = np.median(draw.normal(size=(40_000, count)), axis=1)
        assert count * medians.var() == pytest.approx(_median_variance(count), rel=0.03)


def test_estimates_are_medians_and_single_values_have_no_interval() -> None:
    assert ratio([10.0, 12.0, 50.0], [5.0, 6.0, 7.0]).value == pytest.approx(2.0)
    assert median([2.0, 4.0]).value == pytest.approx(3.0)
    assert difference([5.0, 1.0, 2.0], [1.0, 1.0, 1.0]).value == 1.0
    assert median([3.0]).low is None
    assert ratio([3.0], [1.0, 2.0]).low is None
    for value in np.random.default_rng(0).uniform(0.1, 1e4, 200):
        same = median([float(value)] * 3)
        assert [same.value, same.low, same.high] == pytest.approx([value] * 3)
        assert same.low <= same.value <= same.high  # type: ignore[operator]


def test_the_interval_of_a_share_does_not_go_below_zero() -> None:
    estimate = median([0.0, 0.01, 0.03])
    assert estimate.low == 0.0
    assert median([-1.0, 0.0, 1.0]).low < -1  # type: ignore[operator]


def test_equivalence_is_hardly_ever_shown_where_there_is_none() -> None:
    draw = np.random.default_rng(0)
    pairs = [(draw.normal(0.71, 0.004, 3), draw.normal(0.70, 0.004, 3)) for _ in range(1000)]
    shown = [is_shown(equivalence(list(one), list(other), 0.01)) for one, other in pairs]
    assert np.mean(shown) < 0.06  # the difference is the margin itself: at most 5 %
    shown = [is_shown(equivalence(list(one), list(other), 0.05)) for one, other in pairs]
    assert np.mean(shown) > 0.9


def test_equivalence_needs_repeats_and_little_spread() -> None:
    assert equivalence([0.7], [0.7, 0.7], 0.01) is None
    assert not is_shown(None)
    assert not is_shown(equivalence([0.70, 0.71], [0.70, 0.71], 0.005))
    assert is_shown(equivalence([0.700, 0.701], [0.701, 0.700], 0.01))
    assert equivalence([0.7, 0.7], [0.7, 0.7], 0.01) == 0
    assert equivalence([0.7, 0.7], [0.8, 0.8], 0.01) == 1
