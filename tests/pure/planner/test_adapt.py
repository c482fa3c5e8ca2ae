"""What counts as a change of the machine, and when it is acted on."""

import numpy as np
import pytest

from hvdtrain.parallel.plan import Plan, Stage, replicated
from hvdtrain.planner.adapt import (
    LEAST_SECONDS,
    SETTLING,
    WINDOW,
    Drift,
    Watch,
    decide,
    moving_seconds,
)
from tests.pure.planner.machines import question


def follow(
    watch: Watch, own: "tuple[float, ...]", steps: int, seed: int = 0, noise: float = 0.0
) -> "list[Drift]":
    """What is found while ranks take so long, the step as long as the slowest."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(steps):
        taken = [each * (1 + noise * draw.random()) for each in own]
        drift = watch.add(taken, 1.05 * max(taken))
        found += [drift] if drift else []
    return found


def test_a_rank_that_becomes_slow_is_seen_within_a_window() -> None:
    watch = Watch()
    assert follow(watch, (1.0, 1.0), SETTLING + 3 * WINDOW, noise=0.1) == []
    assert follow(watch, (1.0, 2.0), WINDOW - 1) == []
    (drift,) = follow(watch, (1.0, 2.0), 1)
    assert "rank 1 takes 1.9" in drift.cause
    assert drift.own_seconds == pytest.approx((1.0, 2.0))
    assert drift.step_seconds == pytest.approx(2.1)


def test_a_rank_that_becomes_fast_is_seen_too() -> None:
    watch = Watch()
    follow(watch, (1.0, 2.0), SETTLING + WINDOW)
    (drift,) = follow(watch, (1.0, 1.0), WINDOW)
    assert "rank 1 takes 0.50 times" in drift.cause


def test_noise_and_single_steps_are_no_drift() -> None:
    for seed in range(50):
        watch = Watch()
        assert follow(watch, (1.0, 1.0, 1.0), 100, seed, noise=0.4) == []
    watch = Watch()
    follow(watch, (1.0, 1.0), SETTLING + WINDOW)
    for _ in range(20):
        assert follow(watch, (1.0, 9.0), WINDOW - 1) + follow(watch, (1.0, 1.0), 1) == []


def test_a_network_that_becomes_slow_is_seen() -> None:
    watch = Watch()
    follow(watch, (1.0, 1.0), SETTLING + WINDOW)
    found = [watch.add((1.0, 1.0), 1.5) for _ in range(WINDOW)]
    assert found[:-1] == [None] * (WINDOW - 1)
    assert found[-1] is not None
    assert "ranks wait 43% of a step longer" in found[-1].cause


def test_after_a_change_the_base_is_new() -> None:
    watch = Watch()
    follow(watch, (1.0, 1.0), SETTLING + WINDOW)
    watch.restart()
    assert follow(watch, (1.0, 2.0), SETTLING + 5 * WINDOW) == []
    assert watch.base is not None
    assert watch.base[-1] == pytest.approx(2.1)


@pytest.mark.parametrize(
    ("current", "other", "left", "cost", "change", "said"),
    [
        (1.0, 0.97, 10**6, 0.0, False, "3.0% at best"),
        (1.0, 0.5, 100, 10.0, True, "brings in 50.0 s over the 100 steps left"),
        (1.0, 0.5, 30, 10.0, False, "less than 2 times the 10.0 s of the change"),
        (1.0, 1.2, 100, 0.0, False, "-20.0% at best"),
    ],
)
def test_a_change_has_to_bring_in_more_than_it_costs(
    current: float, other: float, left: int, cost: float, change: bool, said: str
) -> None:
    decision = decide(current, other, left, cost)
    assert decision.change == change
    assert said in decision.reason


def test_many_short_steps_are_one_time_of_a_window() -> None:
    """A burst of a fifth of a second is no change of the machine, however many steps it takes."""
    watch, step = Watch(), 0.01
    many = round(1.1 * WINDOW * LEAST_SECONDS / step)
    follow(watch, (step, step), SETTLING + many)
    for _ in range(20):
        assert follow(watch, (step, 9 * step), 3) + follow(watch, (step, step), 20) == []
    (drift, *_) = follow(watch, (step, 2 * step), many)
    assert "rank 1 takes 2.00 times" in drift.cause


@pytest.mark.parametrize(("times", "seconds"), [(2.0, 1.0), (1.35, 4.2), (1.25, 12.2)])
def test_less_has_to_last_for_longer(times: float, seconds: float) -> None:
    watch, step = Watch(), 0.05
    follow(watch, (step, step), SETTLING + 3 * WINDOW)
    steps = 0
    while not follow(watch, (step, times * step), 1):
        steps += 1
    assert steps * 1.05 * times * step == pytest.approx(seconds, abs=2 * LEAST_SECONDS)


def test_what_moves_is_what_is_not_held_with_its_optimizer_state() -> None:
    """Momentum is as much again as the weights: 2,000 bytes of each of six components."""
    asked = question(ranks=2, each=1e-3)
    names = asked.known.profile.names
    halves = Plan((Stage(tuple(names[:3]), (0,), (1,)), Stage(tuple(names[3:]), (1,), (1,))))
    assert moving_seconds(asked, replicated(list(names), 2, 1, None), halves) == 0.0
    # Rank 0 sends three components and receives three; so does rank 1.
    wider = replicated(list(names), 2, 1, None)
    assert moving_seconds(asked, halves, wider) == pytest.approx(6 * 2000 * 1e-3)
