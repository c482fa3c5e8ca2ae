"""Stragglers are reported, and other ranks are not."""

import numpy as np
import pytest
from numpy.typing import NDArray

from hvdtrain.health.stragglers import (
    Stragglers,
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
    watch.look(window(0.1, 0.1, 0.2))
    assert [straggler.rank for straggler in watch.look(window(0.1, 0.1, 0.2))] == [2], (
        "it came back"
    )


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
