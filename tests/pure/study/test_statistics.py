"""Fits recover the laws that generated the data, and intervals have their coverage."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.study import statistics
from hvdtrain.study.statistics import (
    amdahl,
    equivalence,
    is_shown,
    median,
    ratio,
    usl,
    usl_peak,
)

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)


@settings(max_examples=15, deadline=None)
@given(serial=st.floats(0.0, 0.6), one=st.floats(10, 1e5))
def test_amdahls_law_is_found_again(serial: float, one: float) -> None:
    fit = amdahl({n: [one / (serial + (1 - serial) / n)] for n in SIZES})
    assert fit is not None
    assert fit.parameters["serial_fraction"].value == pytest.approx(serial, abs=1e-4)
    assert fit.parameters["images_per_second"].value == pytest.approx(one, rel=1e-4)
    assert fit.throughput(64) == pytest.approx(one / (serial + (1 - serial) / 64), rel=1e-2)


@settings(max_examples=15, deadline=None)
@given(contention=st.floats(0.01, 0.3), coherency=st.floats(0.001, 0.05))
def test_the_universal_law_is_found_again_with_its_peak(
    contention: float, coherency: float
) -> None:
    fit = usl({n: [500 * n / (1 + contention * (n - 1) + coherency * n * (n - 1))] for n in SIZES})
    assert fit is not None
    assert fit.parameters["contention"].value == pytest.approx(contention, abs=1e-4)
    assert fit.parameters["coherency"].value == pytest.approx(coherency, abs=1e-4)
    peak = usl_peak(fit)
    assert peak == pytest.approx(np.sqrt((1 - contention) / coherency), rel=1e-2)


def test_few_sizes_are_not_fitted_and_four_only_with_a_warning() -> None:
    rates = {n: [100.0 * n**0.8, 102.0 * n**0.8] for n in SIZES}
    assert amdahl({n: rates[n] for n in (1, 2)}) is None
    assert usl({n: rates[n] for n in (1, 2, 4)}) is None
    fit = usl({n: rates[n] for n in (1, 2, 4, 8)})
    assert fit is not None
    assert "4 sizes are hardly enough for three parameters" in fit.warning


def test_without_repeats_there_is_no_interval_and_that_is_said() -> None:
    fit = amdahl({n: [100.0 * n**0.9] for n in (1, 2, 4)})
    assert fit is not None
    assert fit.parameters["serial_fraction"].low is None
    assert "without repeats" in fit.warning
    assert median([3.0]).low is None
    assert ratio([3.0], [1.0, 2.0]).low is None


def test_what_a_law_does_not_describe_is_said() -> None:
    faster = amdahl({1: [100.0], 2: [235.0], 4: [505.0], 8: [1050.0]})
    slower = amdahl({1: [100.0], 2: [55.0], 4: [25.0], 8: [7.5]})
    assert faster is not None
    assert slower is not None
    assert "serial fraction is at its bound" in faster.warning
    assert "so it does not describe these runs" in slower.warning
    assert not slower.describes
    good = amdahl({1: [100.0], 2: [181.0], 4: [308.0], 8: [470.0]})
    assert good is not None
    assert good.describes
    fit = usl({1: [100.0], 2: [235.0], 4: [505.0], 8: [1050.0]})
    assert fit is not None
    assert usl_peak(fit) is None


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    generator, held = np.random.default_rng(1), 0
    for _ in range(200):
        estimate = median(list(generator.normal(10, 1, 25)))
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low <= 10 <= estimate.high
    assert held / 200 == pytest.approx(statistics.CONFIDENCE, abs=0.06)


def test_a_ratio_is_one_of_medians_and_the_same_each_time() -> None:
    over, under = [10.0, 12.0, 50.0], [5.0, 6.0, 7.0]
    estimate = ratio(over, under)
    assert estimate.value == 2.0
    assert estimate == ratio(over, under)
    assert estimate.low is not None
    assert estimate.high is not None
    assert 10 / 7 <= estimate.low <= 2.0 <= estimate.high <= 10.0


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
