"""The emulated part of paper B's report: its runs, and its verdicts."""

from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.config import TrainConfig
from hvdtrain.planner.clusters import load
from hvdtrain.study.paper_b import emulated, emulations
from hvdtrain.study.paper_b.emulations import (
    CHANGES,
    Comparison,
    Emulated,
    Emulations,
    Scenario,
    _during,
    _of_size,
)
from hvdtrain.study.paper_b.options import PaperBOptions
from hvdtrain.study.runs import Arm

CHANGE = {change.key: change for change in CHANGES}


def options(folder: Path) -> PaperBOptions:
    made = folder / "images-224-100" / "index.json"  # so that no images are made
    made.parent.mkdir()
    made.touch()
    return PaperBOptions(data="somewhere", to=str(folder), emulated_steps=10)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.key)
def test_a_change_is_in_the_cluster_file_of_valid_runs(
    tmp_path: Path, change: emulations.Change
) -> None:
    comparisons = _during(options(tmp_path), change)
    static = ["DP"] if change.event is None else ["DP", "MP", "hybrid"]
    assert sorted(one.strategy for one in comparisons) == sorted([*static, "adaptive"])
    for one in comparisons:
        config = one.arm.config
        config.check()
        assert config.max_steps == 40
        assert load(str(config.emulate)) == change.cluster(40)
    events = change.cluster(40).events
    assert [event.from_step for event in events] == [21 if change.is_late else 0] * len(events)


def test_the_bound_is_the_mean_of_both_halves() -> None:
    quiet, late = CHANGE["quiet"].bound(), CHANGE["throttled"].bound()
    whole = replace(CHANGE["throttled"], is_late=False).bound()
    assert quiet < whole
    assert late == pytest.approx((quiet + whole) / 2)


def test_a_size_that_the_preset_has_not_is_one_node(tmp_path: Path) -> None:
    comparison = _of_size(options(tmp_path), 16)
    cluster = load(str(comparison.arm.config.emulate))
    assert (cluster.ranks, cluster.ranks_per_node) == (16, 16)
    assert cluster.gflops == load("8-v100").gflops


def run_of(strategy: str, seconds: float, expected: float, changes: int = 0) -> Emulated:
    config = TrainConfig(model="resnet50", data="somewhere")
    comparison = Comparison("resnet50", strategy, Arm("key", "name", 8, config), expected)
    return Emulated(comparison, seconds, seconds, 0.02, 12.0, changes)


def scenario(key: str, adaptive: float, changes: int) -> Scenario:
    runs = {
        name: run_of(name, seconds, 0.1, changes)
        for name, seconds in {"DP": 0.15, "MP": 0.3, "hybrid": 0.2, "adaptive": adaptive}.items()
    }
    return Scenario(CHANGE[key], runs)


def test_adaptive_is_compared_with_the_best_static_plan_and_the_bound() -> None:
    line = emulated.verdict(scenario("throttled", 0.12, 1))
    assert "1.25x as fast as the best static plan, DP" in line
    assert "DP; that is 83% of the bound, 1.50x" in line
    assert "keeps its plan" in emulated.verdict(scenario("quiet", 0.1, 0))
    assert "without a reason" in emulated.verdict(scenario("quiet", 0.1, 2))


def test_the_section_has_the_largest_difference_and_all_tables() -> None:
    near, far = run_of("DP", 0.102, 0.1), run_of("MP", 0.09, 0.1)
    changed = [scenario("throttled", 0.12, 1)]
    text = emulated.section(Emulations([near, far], [near], [], changed))
    assert "The mean difference is 6.0%, the largest -10.0% (resnet50, MP)." in text
    assert "| 8 | 20 |" in text
    assert "| 150.0 | 300.0 | 200.0 | 120.0 | 100.0 | 1 |" in text
    short = emulated.section(Emulations([near], [], [], []))
    assert "left out by `--emulated-steps 0`" in short
