"""benchmarks/comparison.py: turns, disturbed rounds, and ratios that say something."""

import importlib.util
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from hvdtrain.host.counters import Disturbance, Load
from tests.conftest import ROOT

SPEC = importlib.util.spec_from_file_location(
    "benchmark_comparison", ROOT / "benchmarks" / "comparison.py"
)
assert SPEC is not None
assert SPEC.loader is not None
comparison = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(comparison)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    disturb(monkeypatch, ())


def disturb(monkeypatch: pytest.MonkeyPatch, rounds: tuple[int, ...]) -> None:
    """Let another program use a core beside these rounds, counted from 0."""
    numbers = count()

    def disturbance(loads: list[Load]) -> Disturbance:
        return Disturbance(2, float(next(numbers) in rounds), 0.0, 0.0)

    monkeypatch.setattr(comparison.counters, "disturbance", disturbance)


def sides(first: list[float], second: list[float]) -> dict[str, Callable[[int], float]]:
    return {"ours": first.__getitem__, "theirs": second.__getitem__}


def test_a_rate_is_better_if_it_is_higher_and_a_time_if_it_is_lower() -> None:
    figures = [10.0, 10.2, 9.9, 10.1], [20.0, 20.1, 20.2, 19.9]
    rate = comparison.compare("rates", "images/s", sides(*figures), 4)
    time = comparison.compare("times", "s", sides(*figures), 4)
    assert rate.faster("theirs").value == pytest.approx(0.5, rel=0.02)
    assert time.faster("theirs").value == pytest.approx(2.0, rel=0.02)
    assert time.faster("theirs").low < time.faster("theirs").value < time.faster("theirs").high


@pytest.mark.parametrize(("goal", "word"), [(1.5, "met"), (2.0, "not shown"), (2.5, "missed")])
def test_a_goal_is_met_if_the_whole_interval_reaches_it(goal: float, word: str) -> None:
    figures = sides([10.0, 10.2, 9.9, 10.1], [20.0, 20.1, 20.2, 19.9])
    result = comparison.compare("times", "s", figures, 4, goals={"theirs": goal})
    assert comparison.rows(result)[0][-1] == f"{goal:.2f}: {word}"
    assert comparison.rows(comparison.compare("times", "s", figures, 4))[0][-1] == ""


@pytest.mark.proves(
    "Benchmarks take turns, measure disturbed rounds again, and give no ratio that says "
    "too little."
)
def test_ratios_are_those_of_a_round() -> None:
    """The machine is three times slower in one round, for both sides."""
    result = comparison.compare("times", "s", sides([1, 3, 1.0, 1.01], [2, 6, 2.0, 2.0]), 4)
    assert result.faster("theirs").high < 2.1


def test_rounds_that_differ_too_much_give_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    result = comparison.compare("times", "s", sides([1.0, 2.0, 1.0], [1.5, 1.0, 3.0]), 3)
    assert result.faster("theirs") is None
    assert "not known: the rounds differ too much" in capsys.readouterr().out
    assert comparison.rows(result)[0][0] == "times: ours against theirs"


def test_one_round_gives_no_ratio() -> None:
    assert comparison.compare("times", "s", sides([1.0], [2.0]), 1).faster("theirs") is None


def test_a_disturbed_round_is_measured_again_and_kept_in_the_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disturb(monkeypatch, (1,))
    monkeypatch.setenv(comparison.RECORD, str(tmp_path / "record"))
    comparison.compare("times", "s", sides([1, 9, 1, 1], [2, 2, 2, 2]), 3)
    (line,) = (tmp_path / "record").read_text().splitlines()
    record = json.loads(line)
    assert record["values"] == {"ours": [1, 1, 1], "theirs": [2, 2, 2]}
    assert record["disturbed"] == {"ours": [9], "theirs": [2]}
    assert "3 rounds" in capsys.readouterr().out


def test_if_all_rounds_are_disturbed_there_are_no_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disturb(monkeypatch, tuple(range(10)))
    result = comparison.compare("times", "s", sides([1] * 4, [2] * 4), 2)
    assert result.faster("theirs") is None
    assert "every round was disturbed" in capsys.readouterr().out
    assert len(result.disturbed["ours"]) == 4
