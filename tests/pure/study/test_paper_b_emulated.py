"""The emulated part of paper B's report: its runs, and its verdicts."""

from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.config import TrainConfig
from hvdtrain.planner.clusters import load
from hvdtrain.study.paper_b import emulated
from hvdtrain.study.paper_b.emulations import (
    CHANGES,
    Change,
    Comparison,
    Emulated,
    Emulations,
    Scenario,
    _during,
    _of_size,
)
from hvdtrain.study.paper_b.options import PaperBOptions
from hvdtrain.study.runs import Arm
from hvdtrain.study.statistics import Estimate

CHANGE = {change.key: change for change in CHANGES}


def options(folder: Path) -> PaperBOptions:
    return PaperBOptions(data="somewhere", to=str(folder), event_steps=40)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.key)
def test_a_change_is_in_the_cluster_file_of_valid_runs(tmp_path: Path, change: Change) -> None:
    comparisons = _during(options(tmp_path), change)
    # DP is the planner's plan unless devices differ: slow links cost a large model little.
    foreseen = ["foreseen"] if change.key in ("throttled", "two-kinds") else []
    assert [one.strategy for one in comparisons] == ["DP", "adaptive", *foreseen]
    for one in comparisons:
        one.arm.config.check()
        assert one.arm.config.max_steps == 40
        assert load(str(one.arm.config.emulate)) == change.cluster(40)
    events = change.cluster(40).events
    assert [event.from_step for event in events] == [21 if change.is_late else 0] * len(events)
    if change.event is not None:
        (event,) = change.cluster(0).events
        assert event.from_step == 0


def test_the_bound_and_predictions_are_means_of_both_halves() -> None:
    quiet, late = CHANGE["quiet"], CHANGE["throttled"]
    whole = replace(late, is_late=False)
    assert quiet.bound < whole.bound
    assert late.bound == pytest.approx((quiet.bound + whole.bound) / 2)
    for strategy in ("DP", "MP"):
        plan = late.plans[strategy]
        both = (quiet.predicted(plan) + whole.predicted(plan)) / 2
        assert late.predicted(plan) == pytest.approx(both) and both > late.bound
    # Half the speed of one device halves that of DP with equal shares, not of the foreseen plan.
    assert late.predicted(late.plans["foreseen"]) < 0.8 * late.predicted(late.plans["DP"])


def test_a_size_that_the_preset_has_not_is_one_node(tmp_path: Path) -> None:
    comparison = _of_size(options(tmp_path), 16)
    cluster = load(str(comparison.arm.config.emulate))
    assert (cluster.ranks, cluster.ranks_per_node) == (16, 16)
    assert cluster.gflops == load("8-v100").gflops


def run_of(strategy: str, seconds: float, expected: Estimate, changes: int = 0) -> Emulated:
    arm = Arm("key", "name", 8, TrainConfig(model="resnet50", data="somewhere"))
    comparison = Comparison("resnet50", strategy, arm, expected)
    return Emulated(comparison, seconds, seconds, 0.02, 2.0, changes)


def scenario(key: str, adaptive: float, changes: int) -> Scenario:
    """Return runs whose seconds are multiples of the bound."""
    change = CHANGE[key]
    times = {"DP": 1.5, "foreseen": 1.1, "adaptive": adaptive}
    runs = {
        name: run_of(name, factor * change.bound, Estimate(change.bound), changes)
        for name, factor in times.items()
    }
    return Scenario(change, runs)


def test_adaptive_is_compared_with_static_plans_and_the_bound() -> None:
    line = emulated.verdict(scenario("throttled", 1.25, 1))
    assert "1.20x as fast as DP, the best of DP, MP and hybrid" in line
    assert "0.88x as fast as the foreseen plan" in line
    assert "reaches 80% of the bound" in line and "10.0 ms" in line
    assert line.endswith("the bound is 1.50x as fast as DP.")
    assert "keeps its plan" in emulated.verdict(scenario("quiet", 1, 0))
    assert "without a reason" in emulated.verdict(scenario("quiet", 1, 2))


def test_the_section_names_what_is_far_away_and_what_is_left_out() -> None:
    near = run_of("DP", 0.102, Estimate(0.1, 0.09, 0.11))
    far = run_of("MP", 0.08, Estimate(0.1))
    changed = [scenario("throttled", 1.25, 1)]
    text = emulated.section(Emulations([near, far], [near], [], changed))
    assert "Farther than 10% away: resnet50, MP, 8 ranks (-20.0%)." in text
    assert "| resnet50 | DP | 8 | 100.0 (90.0 to 110.0) | 102.0 | +2.0% | 2 | 20 |" in text
    assert "The mean difference is 2.0%. All are within 10%." in text
    assert f"| ({1e3 * CHANGE['throttled'].bound:.1f}) | 1 |" in text
    short = emulated.section(Emulations([near], [], [], []))
    assert "Left out by `--emulated-steps 0`" in short
    assert "Left out by `--event-steps 0`" in short
