"""The dilated clock and the modelled device, on a clock that the test moves."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch

from hvdtrain.emulate import Clock, Emulation, Flight, Hardware
from hvdtrain.planner.clusters import DEVICES, LINKS, PRESETS, Event
from hvdtrain.planner.cost import Question
from hvdtrain.world import World


class Time:
    """Seconds that pass in sleeps, which end late by a fixed time."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self.late = 100.0, late

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late


def clock_on(time: Time, dilation: float) -> Clock:
    return Clock(dilation, lambda: time.now, time.sleep)


def hardware_on(time: Time, events: tuple[Event, ...] = (), dilation: float = 10.0) -> Hardware:
    quiet = replace(
        PRESETS["8-v100"], events=events, compute_contention=1.25, reduce_contention=2.0
    )
    return Hardware.of_cluster(quiet, 0, clock_on(time, dilation))


def test_work_takes_its_seconds_times_the_dilation() -> None:
    time = Time()
    clock_on(time, 10).work(0.5)
    assert time.now == pytest.approx(105)


def test_sleeps_that_end_late_do_not_add_up() -> None:
    time = Time(late=0.2)
    clock = clock_on(time, 10)
    for _ in range(10):
        clock.work(0.1)
    assert time.now == pytest.approx(100 + 10 + 0.2)


def test_work_that_is_shorter_than_the_delay_of_a_sleep_shortens_what_follows() -> None:
    time = Time(late=0.2)
    clock = clock_on(time, 10)
    for seconds in (0.1, 0.005, 0.005, 0.1):  # the two in the middle take no real time
        clock.work(seconds)
    assert time.now == pytest.approx(100 + 2.1 + 0.2)


def test_a_deadline_within_the_delay_of_the_last_sleep_counts() -> None:
    time = Time(late=0.2)
    clock = clock_on(time, 10)
    clock.work(0.1)  # until 101, and it ends at 101.2
    clock.until(101.15)
    assert time.now == pytest.approx(101.2)
    assert clock.modelled_now() == pytest.approx(101.15)
    clock.until(101.1)
    assert clock.modelled_now() == pytest.approx(101.15)


def test_time_between_two_sleeps_counts() -> None:
    time = Time()
    clock = clock_on(time, 10)
    clock.work(0.1)
    time.now += 3
    clock.work(0.1)
    assert time.now == pytest.approx(100 + 2 + 3)


def test_a_deadline_in_the_past_takes_no_time() -> None:
    time = Time(late=0.2)
    clock_on(time, 10).until(99)
    assert time.now == 100


def test_a_device_is_slow_during_its_event_only() -> None:
    time = Time()
    hardware = hardware_on(time, (Event(DEVICES, 3.0, (0,), from_step=5, to_step=6),))
    for step, after in ((4, 110), (5, 140), (6, 150)):
        hardware.step = lambda step=step: step  # type: ignore[misc]
        hardware.compute(1.0)
        assert time.now == pytest.approx(after)


def test_a_congested_link_is_slow_during_its_event_only() -> None:
    hardware = hardware_on(Time(), (Event(LINKS, 4.0, from_step=5),))
    before = hardware.reduce_seconds((0, 1), 2**20)
    hardware.step = lambda: 5
    assert hardware.reduce_seconds((0, 1), 2**20) == pytest.approx(4 * before)


def test_computing_is_slower_while_an_all_reduce_is_in_flight() -> None:
    time = Time()
    hardware = hardware_on(time)
    hardware.flights.append(Flight(start=100.0, seconds=1000.0))
    hardware.compute(1.0)
    assert time.now == pytest.approx(112.5)


def test_an_all_reduce_ends_later_by_the_part_that_computing_slows() -> None:
    hardware = hardware_on(Time())
    assert hardware.end_of(start=10, seconds=4, waiting_since=10) == pytest.approx(14)
    assert hardware.end_of(start=10, seconds=4, waiting_since=12) == pytest.approx(15)
    assert hardware.end_of(start=10, seconds=4, waiting_since=99) == pytest.approx(18)


@pytest.mark.parametrize("real", [0.0, 0.001, 5.0])
@pytest.mark.parametrize("poll", [0.0, 0.3])
def test_an_all_reduce_that_the_planner_measures_takes_its_modelled_seconds(
    real: float, poll: float
) -> None:
    """However long the real sum takes, and however late a poll finds out that it is over."""
    time = Time()
    hardware = hardware_on(time, dilation=10.0)

    def start(stamps: torch.Tensor, name: str) -> Callable[[], bool]:
        summed_at = time.now + real
        return lambda: time.now >= summed_at

    tools = Emulation("", hardware, cast(Question, None), []).tools(
        start, World("none", 0, 2, 0, 2, 1), torch.device("cpu")
    )
    began, values = tools.now(), torch.zeros(2**20)
    seconds = hardware.reduce_seconds([0, 1], values.nbytes)
    assert seconds > 1e-4
    is_over = tools.start(values, "sum")
    while not is_over():
        time.now += poll or real
    assert tools.now() - began == pytest.approx(seconds)
    began = time.now
    hardware.compute(1)
    assert time.now - began == pytest.approx(10), "a real sum must not shorten other work"
