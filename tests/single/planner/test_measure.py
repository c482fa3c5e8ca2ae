"""Measuring components and networks: disturbances, and operations that take long."""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest
import torch

from hvdtrain.parallel.exchange import Exchange
from hvdtrain.planner import measure, probe
from hvdtrain.planner.chain import Chain, Disturb, Halves, Seconds
from hvdtrain.world import World

ALONE = World("none", 0, 1, 0, 1, 1)
SIZES = (2, 4, 8, 16, 32)


class Disturbed:
    """A chain of two components with 1 ms per sample; some measurements take twice as long."""

    device = torch.device("cpu")

    def __init__(self, disturbed: Sequence[int]) -> None:
        self.disturbed, self.measured = disturbed, 0

    def factor(self) -> float:
        self.measured += 1
        return 2.0 if self.measured - 1 in self.disturbed else 1.0

    def whole(self, rows: int) -> Seconds:
        values = np.full((3, 2), 1e-3 * rows * self.factor())
        return Seconds(values, 2 * values, values, values[:, :1], values[:, :1])

    def in_halves(self, rows: int) -> Halves:
        # The first component has no halves.
        values = np.full((3, 2), 1e-3 * rows * self.factor())
        values[:, 0] = np.nan
        return Halves(values, 2 * values)

    def contended(self, rows: int, disturb: Disturb, seconds: Sequence[float]) -> np.ndarray:
        # The second component is three times slower beside an all-reduce, the first one faster.
        for duration in seconds:
            disturb(duration)()
        return np.full((3, 2), 2e-3 * rows) * [0.9, 3]


# Measurements in order: 2, 4, 8, 16, 32, 32, 16, 8, 4, 2 samples.
@pytest.mark.parametrize("disturbed", [(), (2, 3), (0, 1, 2, 3, 4), (5, 6, 7, 8, 9), (4, 6)])
def test_a_disturbed_measurement_does_not_count(disturbed: Sequence[int]) -> None:
    result = measure._measured(cast(Chain, Disturbed(disturbed)), SIZES, ALONE)
    for rows in SIZES:
        assert result.whole[rows].forward == pytest.approx(1e-3 * rows)
        assert result.whole[rows].backward == pytest.approx(2e-3 * rows)


def test_emulated_passes_are_measured_once() -> None:
    chain = Disturbed(())
    measure._measured(cast(Chain, chain), SIZES, ALONE, is_emulated=True)
    assert chain.measured == len(SIZES)


def test_contention_is_the_time_beside_an_all_reduce_over_the_time_alone() -> None:
    disturbed: list[float] = []

    def disturb(seconds: float) -> Callable[[], None]:
        disturbed.append(seconds)
        return lambda: None

    chain = cast(Chain, Disturbed(()))
    result = measure._measured(chain, SIZES, ALONE, disturb=disturb)
    assert result.contention is not None
    assert result.contention == pytest.approx([1.0, 3.0])
    assert disturbed == pytest.approx([measure.LONGER * 2e-3 * SIZES[-2]] * 2)
    assert measure._times(result, 1).contention == pytest.approx(3.0)
    unmeasured = measure._measured(chain, SIZES, ALONE)
    assert unmeasured.contention is None
    assert measure._times(unmeasured, 1).contention is None


def test_a_size_that_is_disturbed_in_most_visits_is_slow() -> None:
    result = measure._measured(cast(Chain, Disturbed((2, 7, 12))), SIZES, ALONE)
    assert result.whole[8].forward == pytest.approx(16e-3)


def test_disturbed_halves_do_not_count() -> None:
    # Whole passes and halves of 4 and 16 samples: 2, 4, 4 in halves, 8, 16, 16 in halves, 32, ...
    result = measure._measured(cast(Chain, Disturbed((2, 9))), SIZES, ALONE, in_halves=True)
    assert sorted(result.halves) == [4, 16]
    for rows, halves in result.halves.items():
        assert halves.weights[:, 1] == pytest.approx(2e-3 * rows)


@pytest.mark.parametrize(
    ("first", "seconds", "calls"),
    [(10.0, 10.0, 2), (12.0, 10.0, 2), (0.2, 0.2, 7), (1e-6, 1e-6, 42), (10.0, 1e-6, 42)],
)
def test_operations_that_take_long_are_not_repeated(
    first: float, seconds: float, calls: int
) -> None:
    called: list[float] = []

    def once() -> float:
        called.append(seconds if called else first)
        return called[-1]

    assert probe._agreed_median(ALONE, once) == seconds
    assert len(called) == calls


# Without latency; and with 40 ms one way, on a link of 0.8 and of 8 Gbit/s.
@pytest.mark.parametrize(
    ("latency", "per_byte", "repeats"),
    [
        (0.0, 1e-7, [42, 7, 1, 1, 1]),
        (0.04, 1e-8, [42, 7, 7, 1, 1]),
        (0.04, 1e-9, [42, 7, 7, 7, 7]),
    ],
)
def test_transfers_that_will_take_long_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch, latency: float, per_byte: float, repeats: list[int]
) -> None:
    trips = {}

    def trip_seconds(_: Exchange, other: int, first: bool, size: int, number: int) -> list[float]:
        trips[size] = number
        return [latency + per_byte * size] * number

    monkeypatch.setattr(probe, "_trip_seconds", trip_seconds)
    sizes = probe.sizes_up_to(2**26)
    curve = probe._transfer_curve(ALONE, cast(Exchange, None), (0, 0), sizes)
    assert curve(2**26) == pytest.approx(latency + per_byte * 2**26)
    assert [trips[2**power] for power in (2, 20, 22, 24, 26)] == repeats


@pytest.mark.parametrize(
    ("group", "everyone", "whole", "expected"),
    [
        (2.0, 3.0, 5.0, 4.0),  # an overhead of 2 s, on any number of ranks
        (2.0, 4.0, 1.0, 0.5),  # four times as fast, in a group too
    ],
)
def test_sums_of_groups_are_corrected_for_what_training_sums_with(
    group: float, everyone: float, whole: float, expected: float
) -> None:
    assert probe.of_training(group, everyone, whole) == pytest.approx(expected)


def test_sums_are_measured_on_tensors_of_the_device() -> None:
    seen = set()

    def start(tensor: torch.Tensor, _: str) -> Callable[[], bool]:
        seen.add(tensor.device.type)
        return lambda: True

    meta = torch.device("meta")
    tools = probe.Tools(start, device=meta)
    curve = probe.reduce_curve(ALONE, tools, (64, 4096))
    probe.measure_contention(ALONE, tools, curve, size=64)
    probe.Disturbance(start, meta, curve)(1e-6)()
    assert seen == {"meta"}
