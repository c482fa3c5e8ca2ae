"""Seconds by size, between and beyond the measured points."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.planner.network import Curve, Line

POINTS = st.lists(
    st.tuples(st.integers(1, 10**6), st.floats(1e-6, 10.0)),
    min_size=1,
    max_size=8,
    unique_by=lambda point: point[0],
)


def curve(points: "list[tuple[int, float]]") -> Curve:
    sizes, seconds = zip(*points, strict=True)
    return Curve.of(sizes, seconds)


@given(POINTS, st.lists(st.floats(0, 10**7), min_size=2, max_size=10))
def test_more_never_takes_less(points: "list[tuple[int, float]]", sizes: "list[float]") -> None:
    made = curve(points)
    seconds = [made(size) for size in sorted(sizes)]
    assert (np.diff(seconds) >= -1e-12).all()
    assert min(seconds) >= 0


@given(POINTS, st.floats(0.001, 10**7))
def test_a_unit_takes_no_less_than_the_least(
    points: "list[tuple[int, float]]", size: float
) -> None:
    made = curve(points)
    assert made(size) >= made.least_per_unit * size * (1 - 1e-9) - 1e-12


@given(POINTS)
def test_no_point_is_raised(points: "list[tuple[int, float]]") -> None:
    """Disturbances of a measurement only increase it."""
    made = curve(points)
    for size, seconds in points:
        assert made(size) <= seconds * (1 + 1e-12)


def test_what_lies_on_a_line_is_found_again() -> None:
    made = Curve.of([8, 64, 16], [2 + 3 * 8, 2 + 3 * 64, 2 + 3 * 16])
    assert made.line == pytest.approx(Line(2, 3))
    assert made(4) == pytest.approx(2 + 3 * 4)
    assert made(1000) == pytest.approx(2 + 3 * 1000)
    assert Curve.straight(Line(2, 3))(17) == pytest.approx(2 + 3 * 17)


def test_a_disturbed_point_is_lowered() -> None:
    assert Curve.of([1, 2, 4], [9.0, 2.0, 4.0]).points == ((1, 2.0), (2, 2.0), (4, 4.0))
