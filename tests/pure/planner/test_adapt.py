"""Tests what counts as a drift of the machine, and when a migration is worth it."""

import numpy as np
import pytest

from hvdtrain.plan.plan import Plan, Stage, replicated
from hvdtrain.planner.adapt import (
    FEW,
    LEAST_SECONDS,
    SETTLING,
    WINDOW,
    Drift,
    Watch,
    decide,
    seconds_to_migrate,
)
from tests.pure.planner.machines import question


def follow(
    watch: Watch, rank_seconds: "tuple[float, ...]", steps: int, seed: int = 0, noise: float = 0.0
) -> "list[Drift]":
    """Return the drifts that a watch reports; the step is 5 % longer than the slowest rank."""
    draw = np.random.default_rng(seed)
    drifts = []
    for _ in range(steps):
        noisy = [seconds * (1 + noise * draw.random()) for seconds in rank_seconds]
        drift = watch.add(noisy, 1.05 * max(noisy))
        drifts += [drift] if drift else []
    return drifts


def test_a_rank_that_becomes_slow_is_seen_within_a_window() -> None:
    watch = Watch()
    assert follow(watch, (0.2, 0.2), SETTLING + 3 * WINDOW, noise=0.1) == []
    assert follow(watch, (0.2, 0.4), WINDOW - 1) == []
    (drift,) = follow(watch, (0.2, 0.4), 1)
    assert "rank 1 is 1.9" in drift.cause
    assert drift.own_seconds == pytest.approx((0.2, 0.4))
    assert drift.step_seconds == pytest.approx(0.42)


def test_fewer_steps_are_enough_if_they_are_long() -> None:
    watch = Watch()
    follow(watch, (1.0, 1.0), SETTLING + WINDOW)
    for _ in range(20):
        assert follow(watch, (1.0, 2.0), FEW - 1) + follow(watch, (1.0, 1.0), 1) == []
    assert follow(watch, (1.0, 2.0), FEW - 1) == []
    (drift,) = follow(watch, (1.0, 2.0), 1)
    assert drift.own_seconds == pytest.approx((1.0, 2.0))


@pytest.mark.parametrize(("seconds", "steps"), [(10.0, FEW), (0.7, 6), (0.2, WINDOW), (0.01, 15)])
def test_a_survey_is_as_long_as_a_drift_must_last(seconds: float, steps: int) -> None:
    assert Drift("", (seconds,), seconds).survey_steps == steps


def test_a_rank_that_becomes_fast_is_seen_too() -> None:
    watch = Watch()
    follow(watch, (1.0, 2.0), SETTLING + WINDOW)
    (drift,) = follow(watch, (1.0, 1.0), FEW)
    assert "rank 1 is 2.00x faster than the plan assumed" in drift.cause


@pytest.mark.parametrize(("factor", "words"), [(1.5, "1.50x slower"), (0.5, "2.00x faster")])
def test_a_machine_that_drifts_as_a_whole_is_seen_as_such(factor: float, words: str) -> None:
    watch = Watch()
    follow(watch, (1.0, 2.0), SETTLING + WINDOW)
    drift = follow(watch, (factor, 2 * factor), 3 * WINDOW)[0]
    assert drift.cause == f"all ranks are {words} than the plan assumed"
    assert drift.is_uniform


@pytest.mark.parametrize("changed", [(1.5, 4.0), (3.0, 2.0)])
def test_ranks_that_drift_apart_are_not_a_whole_machine(changed: "tuple[float, float]") -> None:
    watch = Watch()
    follow(watch, (1.0, 2.0), SETTLING + WINDOW)
    drift = follow(watch, changed, 3 * WINDOW)[0]
    assert drift.cause.startswith("rank ")
    assert not drift.is_uniform


def test_noise_and_single_steps_are_no_drift() -> None:
    for seed in range(50):
        watch = Watch()
        assert follow(watch, (1.0, 1.0, 1.0), 100, seed, noise=0.4) == []
    watch = Watch()
    follow(watch, (0.05, 0.05), SETTLING + 3 * WINDOW)
    for _ in range(20):
        assert follow(watch, (0.05, 0.45), WINDOW - 1) + follow(watch, (0.05, 0.05), 3) == []


def test_a_network_that_becomes_slow_is_seen() -> None:
    watch = Watch()
    follow(watch, (0.2, 0.2), SETTLING + WINDOW)
    drifts = [watch.add((0.2, 0.2), 0.35) for _ in range(WINDOW)]
    assert drifts[:-1] == [None] * (WINDOW - 1)
    assert drifts[-1] is not None
    assert "ranks wait 67% of a step longer than the plan assumed" in drifts[-1].cause


def test_the_latest_steps_count_though_none_of_them_drifts() -> None:
    watch = Watch()
    assert watch.as_they_are("epoch 2").own_seconds == ()
    follow(watch, (1.0, 1.0), SETTLING + 2 * WINDOW)
    assert follow(watch, (1.1, 1.0), 3 * WINDOW) == []
    now = watch.as_they_are("epoch 3")
    assert now.own_seconds == pytest.approx((1.1, 1.0))
    assert now.cause == "epoch 3"
    assert now.step_seconds == pytest.approx(1.05 * 1.1)


def test_after_a_change_the_base_is_new() -> None:
    watch = Watch()
    follow(watch, (1.0, 1.0), SETTLING + WINDOW)
    watch.restart()
    assert follow(watch, (1.0, 2.0), SETTLING + 5 * WINDOW) == []
    assert watch.base is not None
    assert watch.base[-1] == pytest.approx(2.1)


@pytest.mark.proves(
    "A plan changes only where that saves twice its cost, by a profile that follows the steps."
)
@pytest.mark.parametrize(
    ("current", "other", "left", "cost", "change", "reason"),
    [
        (1.0, 0.97, 10**6, 0.0, False, "3.0% at best"),
        (1.0, 0.5, 100, 10.0, True, "saves 50.0 s over the 100 steps left"),
        (1.0, 0.5, 30, 10.0, False, "less than 2x the 10.0 s of the migration"),
        (1.0, 1.2, 100, 0.0, False, "-20.0% at best"),
    ],
)
def test_a_change_has_to_bring_in_more_than_it_costs(
    current: float, other: float, left: int, cost: float, change: bool, reason: str
) -> None:
    decision = decide(current, other, left, cost)
    assert decision.change == change
    assert reason in decision.reason


def test_many_short_steps_are_one_time_of_a_window() -> None:
    """A burst of 0.2 s is not a drift, however many steps it contains."""
    watch, step = Watch(), 0.01
    many = round(1.1 * WINDOW * LEAST_SECONDS / step)
    follow(watch, (step, step), SETTLING + many)
    for _ in range(20):
        assert follow(watch, (step, 9 * step), 3) + follow(watch, (step, step), 20) == []
    (drift, *_) = follow(watch, (step, 2 * step), many)
    assert "rank 1 is 2.00x slower than the plan assumed" in drift.cause


@pytest.mark.parametrize(("times", "seconds"), [(2.0, 1.0), (1.35, 4.2), (1.25, 12.2)])
def test_less_has_to_last_for_longer(times: float, seconds: float) -> None:
    watch, step = Watch(), 0.05
    follow(watch, (step, step), SETTLING + 3 * WINDOW)
    steps = 0
    while not follow(watch, (step, times * step), 1):
        steps += 1
    assert steps * 1.05 * times * step == pytest.approx(seconds, abs=2 * LEAST_SECONDS)


def test_what_moves_is_what_is_not_held_with_its_optimizer_state() -> None:
    """Momentum is as large as the weights: 2,000 bytes for each of six components."""
    machine = question(ranks=2, per_byte=1e-3)
    names = machine.known.profile.names
    halves = Plan((Stage(tuple(names[:3]), (0,), (1,)), Stage(tuple(names[3:]), (1,), (1,))))
    assert seconds_to_migrate(machine, replicated(list(names), 2, 1, None), halves) == 0.0
    # Rank 0 sends three components and receives three; so does rank 1.
    wider = replicated(list(names), 2, 1, None)
    assert seconds_to_migrate(machine, halves, wider) == pytest.approx(6 * 2000 * 1e-3)
