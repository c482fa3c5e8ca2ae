"""Disturbed runs are alarmed among their repeats, and hardly any other."""

import numpy as np

from hvdtrain.study.series import arrange, disturbed
from tests.pure.study.test_series import a_run

STUDIES = 1000


def test_injected_disturbances_are_found_with_few_false_alarms() -> None:
    draw = np.random.default_rng(0)
    injected = recalled = alarms = undisturbed = 0
    for _ in range(STUDIES):
        repeats, noise = int(draw.integers(3, 7)), draw.uniform(0.003, 0.015)
        rates = {n: 100 * n * np.exp(noise * draw.normal(size=repeats)) for n in (1, 2, 4, 8)}
        bad = {(key, int(draw.integers(repeats))) for key in rates if draw.random() < 0.3}
        for key, place in bad:
            rates[key][place] *= 1 - draw.uniform(0.1, 0.5)
        alarmed = {
            (key, place)
            for key, places in disturbed({k: list(v) for k, v in rates.items()}).items()
            for place in places
        }
        injected, recalled = injected + len(bad), recalled + len(bad & alarmed)
        alarms, undisturbed = alarms + len(alarmed - bad), undisturbed + 4 * repeats - len(bad)
    assert recalled / injected >= 0.95
    assert alarms / undisturbed <= 0.05


def test_two_repeats_and_small_losses_are_not_judged() -> None:
    assert disturbed({1: [100.0, 50.0]}) == {}
    assert disturbed({}) == {}
    assert disturbed({1: [100.0, 100.0, 99.0], 2: [200.0, 200.0, 200.0]}) == {}
    assert disturbed({1: [100.0, 100.0, 97.0], 2: [200.0, 200.0, 200.0]}) == {1: [2]}


def test_a_series_names_its_disturbed_runs() -> None:
    runs = [a_run(n, 100 * n + change) for n in (1, 2) for change in (0, 1, -1)]
    slow = a_run(2, 150)
    (series,), _ = arrange([*runs, slow])
    assert series.disturbed == [slow]
