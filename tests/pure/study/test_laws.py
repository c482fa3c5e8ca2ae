"""Laws are found again in what they generated, with intervals, or none is named."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.study.laws import (
    Estimate,
    Fit,
    cautions,
    compare,
    next_run,
    ratio,
    serial_fraction,
    usl_peak,
)
from hvdtrain.study.sections import laws_text
from hvdtrain.study.series import arrange
from tests.pure.study.test_series import a_run
from tests.pure.study.test_statistics import COVERAGE, STUDIES, holds

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)


def fit_of(name: str, measured: dict[int, list[float]], scaling: str = "strong") -> Fit:
    fits = compare(measured, scaling).fits  # type: ignore[arg-type]
    return next(fit for fit in fits if fit.name == name)


@settings(max_examples=15, deadline=None)
@given(serial=st.floats(0.0, 0.6), one=st.floats(10, 1e5))
def test_amdahls_law_is_found_again(serial: float, one: float) -> None:
    fit = fit_of("Amdahl", {n: [one / (serial + (1 - serial) / n)] for n in SIZES})
    assert fit.values["serial_fraction"] == pytest.approx(serial, abs=1e-4)
    assert fit.one == pytest.approx(one, rel=1e-4)
    assert fit.throughput(64) == pytest.approx(one / (serial + (1 - serial) / 64), rel=1e-2)


@settings(max_examples=15, deadline=None)
@given(serial=st.floats(0.0, 0.9), one=st.floats(10, 1e5))
def test_gustafsons_law_is_found_again(serial: float, one: float) -> None:
    rates = {n: [one * (serial + (1 - serial) * n)] for n in SIZES}
    fit = fit_of("Gustafson", rates, "weak")
    assert fit.values["serial_fraction"] == pytest.approx(serial, abs=1e-4)
    assert fit.one == pytest.approx(one, rel=1e-4)


@settings(max_examples=15, deadline=None)
@given(contention=st.floats(0.01, 0.3), coherency=st.floats(0.001, 0.05))
def test_the_universal_law_is_found_again_with_its_peak(
    contention: float, coherency: float
) -> None:
    rates = {n: [500 * n / (1 + contention * (n - 1) + coherency * n * (n - 1))] for n in SIZES}
    fit = fit_of("USL", rates)
    assert fit.values["contention"] == pytest.approx(contention, abs=1e-4)
    assert fit.values["coherency"] == pytest.approx(coherency, abs=1e-4)
    assert usl_peak(fit) == pytest.approx(np.sqrt((1 - contention) / coherency), rel=1e-2)


def test_few_sizes_are_not_fitted_and_four_only_with_a_warning() -> None:
    rates = {n: [100.0 * n**0.8, 102.0 * n**0.8] for n in SIZES}
    assert not compare({n: rates[n] for n in (1, 2)}, "strong").fits
    three = compare({n: rates[n] for n in (1, 2, 4)}, "strong")
    assert [fit.name for fit in three.fits] == ["linear", "Amdahl"]
    fit = fit_of("USL", {n: rates[n] for n in (1, 2, 4, 8)})
    assert "4 sizes are hardly enough for three parameters" in cautions(fit)


def test_without_repeats_there_is_no_interval_and_that_is_said() -> None:
    fit = fit_of("Amdahl", {n: [100.0 * n**0.9] for n in (1, 2, 4)})
    assert compare({n: [100.0 * n**0.9] for n in (1, 2, 4)}, "strong").law is None
    assert fit.parameters["serial_fraction"].low is None
    assert fit.predicted(8).low is None
    assert next_run(fit, 8) is None
    assert "without repeats" in cautions(fit)


def test_where_no_law_describes_the_runs_none_is_named() -> None:
    faster = {1: [100.0], 2: [235.0], 4: [505.0], 8: [1050.0]}
    slower = {1: [100.0], 2: [55.0], 4: [25.0], 8: [7.5]}
    assert compare(faster, "strong").law is None
    assert compare(slower, "strong").law is None
    assert "serial fraction is at its bound" in cautions(fit_of("Amdahl", faster))
    assert "so it does not describe these runs" in cautions(fit_of("Amdahl", slower))
    assert usl_peak(fit_of("USL", faster)) is None
    # Noise of 0.1 % does not explain 5 %, so that a law is refused that is off by less than 10 %.
    step = {1: [100, 100.1, 99.9], 2: [190, 190.2, 189.9], 4: [300, 300.2, 299.8]}
    step |= {8: [610.0, 610.2, 609.8]}
    assert compare(step, "strong").law is None


def truth(kind: str, ranks: float, serial: float, coherency: float) -> float:
    if kind == "Amdahl":
        return 100 / (serial + (1 - serial) / ranks)
    return 100 * ranks / (1 + serial * (ranks - 1) + coherency * ranks * (ranks - 1))


def test_intervals_of_laws_hold_the_truth_as_often_as_they_say() -> None:
    """1,000 studies: speed-up, serial fraction, parameters, predictions of larger sizes."""
    draw = np.random.default_rng(0)
    held: dict[str, list[bool]] = {}
    named: dict[str, Counter[str]] = {"Amdahl": Counter(), "USL": Counter()}
    for _ in range(STUDIES):
        kind, noise = str(draw.choice(["Amdahl", "USL"])), draw.uniform(0.003, 0.02)
        serial, coherency = draw.uniform(0.03, 0.2), draw.uniform(0.01, 0.03)
        repeats = int(draw.integers(3, 7))
        exact = {n: truth(kind, n, serial, coherency) for n in (1, 2, 4, 8, 16, 32)}
        measured = {
            n: list(exact[n] * np.exp(noise * draw.normal(size=repeats))) for n in (1, 2, 4, 8)
        }
        speedup = ratio(measured[8], measured[1])
        fraction = serial_fraction(speedup, 8)
        fit = fit_of(kind, measured)
        known = {"images_per_second": 100.0, "contention": serial, "coherency": coherency}
        known["serial_fraction"] = serial
        for name, estimate, true in (
            ("speed-up", speedup, exact[8] / 100),
            ("serial fraction", fraction, (100 / exact[8] - 1 / 8) / (1 - 1 / 8)),
            ("images/s on 16", fit.predicted(16), exact[16]),
            ("speed-up on 32", fit.predicted(32, over=1), exact[32] / 100),
            *((name, estimate, known[name]) for name, estimate in fit.parameters.items()),
        ):
            held.setdefault(name, []).append(holds(estimate, true))
        law = compare(measured, "strong").law
        named[kind][law.name if law else "none"] += 1
    shares = {name: float(np.mean(values)) for name, values in held.items()}
    assert all(COVERAGE[0] <= share <= COVERAGE[1] for share in shares.values()), shares
    for kind, names in named.items():
        assert names[kind] / names.total() >= 0.93, names


def test_one_more_run_narrows_the_interval_as_predicted() -> None:
    draw, after = np.random.default_rng(2), []
    for _ in range(50):
        rates = {
            n: list(truth("Amdahl", n, 0.1, 0) * np.exp(0.01 * draw.normal(size=4)))
            for n in (1, 2, 4, 8)
        }
        fit = fit_of("Amdahl", rates)
        narrowing = next_run(fit, 32)
        assert narrowing is not None
        ranks, before, expected = narrowing
        assert expected < before
        rates.setdefault(ranks, []).append(
            truth("Amdahl", ranks, 0.1, 0) * float(np.exp(0.01 * draw.normal()))
        )
        after.append(fit_of("Amdahl", rates).width(32) / expected)
    assert float(np.median(after)) == pytest.approx(1, abs=0.15)


def test_karp_and_flatts_fraction_is_that_of_amdahls_law() -> None:
    speedup = Estimate(1 / (0.1 + 0.9 / 8), 4.0, 5.0)
    fraction = serial_fraction(speedup, 8)
    assert fraction.value == pytest.approx(0.1)
    assert fraction.low < 0.1 < fraction.high  # type: ignore[operator]


def test_the_text_names_the_law_its_predictions_and_the_run_that_tells_most() -> None:
    draw = np.random.default_rng(0)
    runs = [
        a_run(n, truth("Amdahl", n, 0.1, 0) * float(np.exp(0.005 * draw.normal())))
        for n in (1, 2, 4, 8)
        for _ in range(4)
    ]
    (series,), _ = arrange(runs)
    text = laws_text(series)
    assert "The simplest law that describes these runs is Amdahl." in text
    assert "| 16 | 6" in text
    assert "| 32 | 7" in text
    assert "One more run on " in text
    assert "If USL holds nevertheless, the speed-up on 32 ranks is " in text
    (few,), _ = arrange([run for run in runs if run.ranks < 4])
    assert laws_text(few) == "No scaling law is fitted: 2 sizes are too few."


def test_linear_scaling_is_claimed_only_as_far_as_it_was_tested() -> None:
    def text(rates: dict[int, list[float]]) -> str:
        runs = [a_run(ranks, value) for ranks, values in rates.items() for value in values]
        return laws_text(arrange(runs)[0][0])

    assert "Without repeats nothing is known of the noise" in text({1: [100], 2: [190], 4: [360]})
    rates = {1: [100, 100.1, 99.9], 2: [203, 203.2, 202.9], 4: [408, 408.3, 407.8]}
    near = text(rates)
    assert "These runs are within 1." in near
    assert "by more than noise" not in near
    assert "| 16 | 1,6" in near
    assert "| 16.00 |" in near, "no interval: a linear law has no speed-up to fit"
    noisy = text({1: [100, 104, 97], 2: [199, 203, 190], 4: [404, 395, 388]})
    assert "do not differ from linear scaling by more than noise" in noisy
