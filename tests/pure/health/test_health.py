"""Stragglers are reported, and other ranks are not."""

import numpy as np
import pytest
from numpy.typing import NDArray

from hvdtrain.health.stragglers import (
    Stragglers,
    Trends,
    as_lists,
    groups_of_equal_work,
    medians_of_others,
)
from hvdtrain.plan.plan import pipeline, replicated

NAMES = ["stem", "body", "neck", "head"]


def window(*own_seconds: float, steps: int = 10, seconds: float = 0.2) -> NDArray[np.float64]:
    """Return a window of steps with these seconds per rank without waiting, with some noise."""
    noise = np.random.default_rng(1).uniform(0.95, 1.05, (steps, len(own_seconds), 1))
    vitals = np.full((steps, len(own_seconds), 5), np.nan)
    vitals[..., 0], vitals[..., 1:2] = seconds, noise * np.array(own_seconds)[:, None]
    return vitals


def test_ranks_of_a_group_do_the_same_work() -> None:
    assert groups_of_equal_work(replicated(NAMES, 3, None, None), 3) == [(0, 1, 2)]
    hybrid = pipeline(NAMES, [1.0] * 4, 4, 2, 2, None, None, "hp:2x2")
    assert groups_of_equal_work(hybrid, 4) == [(0, 1), (2, 3)]
    stages = pipeline(NAMES, [1.0] * 4, 2, 2, 1, None, None, "mp")
    assert groups_of_equal_work(stages, 2) == [(0,), (1,)]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 32])
def test_the_median_of_the_others_is_that(count: int) -> None:
    values = np.random.default_rng(count).integers(0, 9, count).astype(float)
    expected = [np.median(np.delete(values, place)) for place in range(count)]
    assert medians_of_others(values).tolist() == expected


def test_a_slow_replica_is_named_once_with_what_it_costs() -> None:
    watch = Stragglers([(0, 1, 2)])
    assert watch.look(window(0.1, 0.1, 0.2)) == [], "once may be chance"
    (straggler,) = watch.look(window(0.1, 0.1, 0.2))
    assert straggler.rank == 2
    assert 0.45 < straggler.lost_fraction < 0.55
    assert "rank 2 is slow: 20" in str(straggler)
    assert watch.look(window(0.1, 0.1, 0.2)) == [], "it was named"
    assert watch.look(window(0.1, 0.1, 0.1)) == []
    for _ in range(7):
        assert watch.look(window(0.1, 0.1, 0.2)) == [], "it is named again if it lasts longer"
    assert [straggler.rank for straggler in watch.look(window(0.1, 0.1, 0.2))] == [2]


def test_stages_of_a_pipeline_are_compared_with_themselves() -> None:
    watch = Stragglers([(0,), (1,)])
    for _ in range(3):
        assert watch.look(window(0.02, 0.1)) == [], "unequal stages are no fault"
    assert watch.look(window(0.05, 0.1)) == []
    (straggler,) = watch.look(window(0.05, 0.1))
    assert straggler.rank == 0


def test_what_is_short_or_alone_is_not_judged() -> None:
    watch = Stragglers([(0, 1)])
    for _ in range(5):
        assert watch.look(window(0.0001, 0.0003)) == [], "less than a millisecond"
    windows = [watch.look(window(0.1, 0.3, steps=2)) for _ in range(6)]
    assert [len(stragglers) for stragglers in windows] == [0, 0, 0, 0, 0, 1], (
        "twice the steps of a judgement"
    )
    alone = Stragglers([(0,)])
    assert [alone.look(window(seconds)) for seconds in (0.1, 0.5, 0.5, 0.5)] == [[]] * 4


def test_step_lines_have_null_for_what_is_not_measured() -> None:
    lists = as_lists(window(0.1, 0.2))
    assert lists["load"] == [None, None]
    assert lists["own_seconds"][1] is not None
    assert "seconds" not in lists


def looked(trends: Trends, rate: float, share: float = 0.0, windows: int = 1) -> list[str]:
    """Return the causes that windows of ten steps and a second each make known."""
    vitals = window(0.1, 0.1, seconds=0.1)
    vitals[..., 2] = 0.1 * share
    return [cause for _ in range(windows) for cause in trends.look(round(rate), 1.0, vitals)]


def test_throughput_that_falls_and_stays_low_is_reported_once() -> None:
    trends = Trends()
    assert looked(trends, 1000, windows=20) == []
    assert looked(trends, 700, windows=20) == [], "a shared machine is that slow at times"
    assert looked(trends, 400, windows=2) == [], "twice may be chance"
    assert looked(trends, 1000) == []
    assert looked(trends, 400, windows=20) == ["throughput fell"]
    assert looked(trends, 1000) == []
    assert looked(trends, 400, windows=3) == ["throughput fell"], "it fell again"
    message = Trends()
    assert looked(message, 1000, windows=5) == []
    looked(message, 250, windows=2)
    faults = message.look(250, 1.0, window(0.1, 0.1, seconds=0.1))
    assert faults == {"throughput fell": "throughput fell to 250 images/s, 25% of the usual 1,000"}


def test_waiting_for_data_is_reported_with_its_share() -> None:
    trends = Trends()
    assert looked(trends, 1000, share=0.2, windows=20) == []
    assert looked(trends, 1000, share=0.5, windows=10) == ["waiting for data"]
    assert looked(trends, 1000, share=0.1, windows=3) == []
    looked(trends, 1000, share=0.5, windows=2)
    vitals = window(0.1, 0.1, seconds=0.1)
    vitals[..., 2] = 0.05
    (message,) = trends.look(1000, 1.0, vitals).values()
    assert message.startswith("ranks wait for data 50% of the time: stage the data set")


def test_short_windows_are_judged_together() -> None:
    """Eight windows of an eighth of a second are one judgement."""
    trends, vitals = Trends(), window(0.01, 0.01, steps=1, seconds=0.125)
    vitals[..., 2] = 0.06
    reported = [bool(trends.look(10, 0.125, vitals)) for _ in range(40)]
    assert reported.index(True) == 23
    assert sum(reported) == 1
