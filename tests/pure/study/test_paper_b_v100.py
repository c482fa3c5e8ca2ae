"""Paper B's numbers, our prediction of its table I, and the emulated runs with their verdicts."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hvdtrain.options.sections import parse_emulate
from hvdtrain.plan.plan import replicated
from hvdtrain.planner.candidate import play
from hvdtrain.planner.clusters import load, question_of
from hvdtrain.planner.strategies import communication
from hvdtrain.study.options import PaperBOptions
from hvdtrain.study.paper_b.plans import (
    ACCURACY,
    COMMUNICATION,
    CONTRADICTIONS,
    EXPLANATIONS,
    HOURS,
    MEMORY,
    POINTS,
    PUBLISHED,
    SPEEDUP,
    TABLE_I,
)
from hvdtrain.study.paper_b.v100 import (
    CHANGES,
    Change,
    Emulated,
    Prediction,
    costs_of,
    emulated_section,
    predict,
    predicted_section,
    question_for,
    verdict,
)

CHANGE = {change.key: change for change in CHANGES}


@cache
def prediction() -> Prediction:
    return predict("vit_b16")


def test_the_words_on_the_paper_have_the_numbers_of_its_table() -> None:
    rates = {"resnet50": (56.5, 169, 109, 183, 214), "vit_b16": (36.2, 95, 76, 105, 117)}
    contradictions, explanations = "\n".join(CONTRADICTIONS), "\n".join(EXPLANATIONS)
    for model, published in PUBLISHED.items():
        hours, speedup, memory = (published.values[name] for name in (HOURS, SPEEDUP, MEMORY))
        share = published.values[COMMUNICATION]["DP"]
        for name, rate in zip(TABLE_I, rates[model], strict=True):
            assert 100 * 50_000 / 3600 / hours[name] == pytest.approx(rate, rel=0.005)
        accuracies = published.values[ACCURACY].values()
        assert max(accuracies) - min(accuracies) <= POINTS
        for words in (
            f"{hours['hybrid'] / hours['adaptive']:.2f}x",
            f"{speedup['hybrid']:.2f}x",
            f"{speedup['DP']:.2f}x",
            f"{8 * hours['DP'] * (1 - share):.1f}",
            f"{hours['single']}",
            f"{memory['DP']} against {memory['single']} GB",
        ):
            assert words in contradictions
        operations = 3 * sum(cost.forward_flops for cost in costs_of(model))
        for words in (
            f"{rates[model][0]} ",
            f"{operations * rates[model][0] / 15.7e12:.0%} ",
            f"{share:.1%} ",
            f"{8 * (1 - share):.1f}",
            f"{speedup['DP']:.2f}",
            f"{memory['DP']}",
        ):
            assert words in explanations


@pytest.mark.parametrize(
    ("model", "gbytes", "whole_batch_gb"), [("resnet50", 2.14, 14.1), ("vit_b16", 1.04, 31.8)]
)
def test_the_explanations_have_the_numbers_of_the_simulator(
    model: str, gbytes: float, whole_batch_gb: float
) -> None:
    cluster, costs, row = load("8-v100"), costs_of(model), PUBLISHED[model]
    plan = replicated([cost.name for cost in costs], 8, None, None)
    slower = question_for(model, replace(cluster, gbytes=gbytes), costs)
    share = communication(slower, play(slower, plan, "DP"))
    assert share == pytest.approx(row.values[COMMUNICATION]["DP"], abs=2e-3)
    whole = question_of(cluster, costs, 8 * row.batch_size, row.optimizer)
    assert max(play(whole, plan, "DP").rank_bytes) / 1e9 == pytest.approx(whole_batch_gb, abs=0.05)
    text = "\n".join(EXPLANATIONS)
    assert re.search(rf"\b{gbytes}\b", text) and re.search(rf"\b{whole_batch_gb}\b", text)


def test_the_table_has_the_papers_numbers_beside_ours() -> None:
    text = predicted_section([prediction()])
    rows = {
        line.split(" | ")[0].strip("| "): [cell.strip(" |") for cell in line.split(" | ")[1:]]
        for line in text.splitlines()
        if line.startswith("| ")
    }
    assert rows[""] == list(TABLE_I)
    assert rows["hours, paper"] == ["38.4", "14.6", "18.2", "13.2", "11.9"]
    assert rows["memory (GB), paper"] == ["28.4", "30.1", "9.8", "12.4", "13.6"]
    assert rows["communication, paper"] == ["0.0%", "38.7%", "22.4%", "29.8%", "25.3%"]
    assert rows["speed-up, paper"] == ["1.00", "2.63", "2.11", "2.91", "3.23"]
    ours = list(map(float, rows["hours, predicted"]))
    assert ours[-1] == min(ours) and ours[0] == max(ours)
    assert EXPLANATIONS[0] in text


def test_the_batch_is_the_power_of_two_whose_memory_is_closest() -> None:
    paper = PUBLISHED["vit_b16"].values[MEMORY]["single"]
    memory = prediction().values[MEMORY]["single"]
    parameters = sum(cost.parameters for cost in costs_of("vit_b16"))
    lasting = 4 * 4 * parameters / 1e9  # weights, gradients and AdamW's two copies
    half, double = ((memory - lasting) * factor + lasting for factor in (0.5, 2))
    assert abs(memory - paper) < min(abs(half - paper), abs(double - paper))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.key)
def test_a_change_is_in_the_cluster_file_of_valid_runs(tmp_path: Path, change: Change) -> None:
    arms = change.arms(PaperBOptions(data="somewhere", to=str(tmp_path), event_steps=40))
    # DP is the planner's plan unless devices differ: slow links cost a large model little.
    foreseen = ["foreseen"] if change.key in ("throttled", "two-kinds") else []
    assert list(arms) == ["DP", "adaptive", *foreseen]
    for arm in arms.values():
        arm.config.check()
        assert arm.config.max_steps == 40
        assert load(parse_emulate(str(arm.config.emulate))[0]) == change.cluster(40)
    events = change.cluster(40).events
    assert [event.from_step for event in events] == [21 if change.is_late else 0] * len(events)
    assert {event.from_step for event in change.cluster(0).events} <= {0}


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


def runs_of(key: str, adaptive: float, changes: int) -> dict[str, Emulated]:
    """Return runs whose seconds are multiples of the bound."""
    times = {"DP": 1.5, "foreseen": 1.1, "adaptive": adaptive}
    bound = CHANGE[key].bound
    return {name: Emulated(factor * bound, 0.01, changes) for name, factor in times.items()}


def test_adaptive_is_compared_with_static_plans_and_the_bound() -> None:
    throttled, quiet = CHANGE["throttled"], CHANGE["quiet"]
    line = verdict(throttled, runs_of("throttled", 1.25, 1))
    assert "1.20x as fast as DP, the best of DP, MP and hybrid" in line
    assert "0.88x as fast as the foreseen plan" in line
    assert "reaches 80% of the bound" in line and "10.0 ms" in line
    assert line.endswith("the bound is 1.50x as fast as DP.")
    text = emulated_section([(throttled, runs_of("throttled", 1.25, 1))])
    assert f"| ({1e3 * throttled.bound:.1f}) | 1 |" in text and line in text
    assert "keeps its plan" in verdict(quiet, runs_of("quiet", 1, 0))
    assert "without a reason" in verdict(quiet, runs_of("quiet", 1, 2))
    assert "Left out by `--event-steps 0`" in emulated_section([])
