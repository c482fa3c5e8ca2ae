"""The strategies of paper B as plans, and verdicts for given measurements."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.data.index import Index
from hvdtrain.errors import UsageError
from hvdtrain.models.costs import ComponentCost
from hvdtrain.plan.plan import labels
from hvdtrain.study.options import ModelAtSize, PaperBOptions, devices
from hvdtrain.study.paper_b import plans
from hvdtrain.study.paper_b.claims import of_accuracies, of_predictions, of_sizes, of_times
from hvdtrain.study.paper_b.plans import Case, Measured, Optimum
from hvdtrain.study.paper_b.report import accuracy_table, objective_lines, time_table
from hvdtrain.study.paper_b.v100 import predict
from hvdtrain.study.results import Epoch, Result
from tests.pure.planner.test_clusters import costs_of
from tests.pure.study.test_paper_a import runs


@pytest.mark.parametrize("ranks", [2, 3])
def test_on_few_ranks_the_tail_with_half_of_the_parameters_is_on_one(ranks: int) -> None:
    costs = costs_of("resnet50")
    plan = plans.hybrid(costs, ranks)
    heavy = plan.stages[-1]
    assert heavy.ranks == (ranks - 1,)
    assert plan.stages[0].ranks == tuple(range(ranks))
    held = sum(cost.parameters for cost in costs if cost.name in heavy.components)
    without_first = held - parameters(costs, heavy.components[0])
    total = sum(cost.parameters for cost in costs)
    assert without_first < total / 2 <= held


def parameters(costs: Sequence[ComponentCost], name: str) -> int:
    return next(cost.parameters for cost in costs if cost.name == name)


def test_on_four_ranks_the_hybrid_has_two_stages_of_two() -> None:
    plan = plans.hybrid(costs_of("resnet50"), 4)
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3)]


def test_the_plan_of_figure_6_has_its_labels() -> None:
    names = ["embed", *(f"block{n}.{part}" for n in range(5) for part in ("attention", "mlp"))]
    plan = plans.figure_6([*names, "head"], 4)
    assert plan is not None
    label_of = labels(plan)
    assert label_of["embed"] == "HP"
    assert {label_of[name] for name in names if name.endswith("attention")} == {"MP"}
    assert {label_of[name] for name in names if name.endswith("mlp")} == {"DP"}
    holders = [stage.ranks for stage in plan.stages if "attention" in stage.components[0]]
    assert holders == [(0,), (1,), (2,), (3,), (0,)]
    assert plans.figure_6(["stem", "head"], 2) is None


def measured(hours: dict[str, list[float]], accuracy: dict[str, list[float]]) -> Measured:
    def of(values: list[float]) -> list[Result]:
        # 64 images per step: 78,200 steps in 100 epochs.
        return [run for value in values for run in runs([1.0], step_seconds=value / 78_200 * 3600)]

    def trained(values: list[float]) -> list[Result]:
        return [run for value in values for run in runs([1.0], accuracy=value)]

    timed = {name: of(values) for name, values in hours.items()}
    return Measured("m", 2, timed, {name: trained(values) for name, values in accuracy.items()})


BASE: dict[str, list[float]] = {
    "single": [10.0, 10.1, 9.9],
    "DP": [6.0, 6.1, 5.9],
    "MP": [8.0, 8.1, 7.9],
    "hybrid": [7.0, 7.1, 6.9],
}


OVER_ONE = "adaptive is faster than one GPU: 3.8x (ResNet-50) and 3.2x (ViT-B/16) on eight"
OVER_HYBRID = "adaptive is faster than static hybrid: 1.18x and 1.15x on eight"
HERE = " (only the direction is judged here)"
FASTEST = "adaptive is the fastest"


def found(one: Measured) -> dict[str, tuple[str, str]]:
    """Return what was found and the verdict, by claim."""
    return {row.claim.removesuffix(HERE): (row.result, row.verdict) for row in of_times(one)}


@pytest.mark.parametrize(
    ("adaptive", "number", "verdicts"),
    [
        ([5.0, 5.1, 4.9], "2.00 (1.91 to 2.10)x", ("shown", "shown", "shown")),
        ([6.0, 6.05, 5.95], "1.67 (1.63 to 1.71)x", ("shown", "shown", "not shown")),
        ([12.0, 12.1, 11.9], "0.83 (0.81 to 0.85)x", ("contradicted",) * 3),
        ([5.0], "2.00x", ("not shown (one run of each)",) * 3),
    ],
)
def test_a_claim_is_shown_only_if_the_interval_says_so(
    adaptive: list[float], number: str, verdicts: tuple[str, str, str]
) -> None:
    rows = found(measured(BASE | {"adaptive": adaptive}, {}))
    assert rows[OVER_ONE][0] == number
    assert tuple(rows[claim][1] for claim in (OVER_ONE, OVER_HYBRID, FASTEST)) == verdicts
    assert rows[FASTEST][0].endswith("x of the best static one, DP")


def test_a_size_is_compared_on_as_many_ranks_as_the_paper_has() -> None:
    """Two ranks say nothing of 3.8x on eight GPUs: only the direction of the claim counts."""
    one = measured(BASE | {"adaptive": [5.0, 5.1, 4.9]}, {})
    assert found(one)[OVER_ONE] == ("2.00 (1.91 to 2.10)x", "shown")
    assert next(of_times(one)).claim == OVER_ONE + HERE
    on_eight = replace(one, ranks=8, model="resnet50")
    assert next(of_times(on_eight)).claim == OVER_ONE
    assert found(on_eight)[OVER_ONE] == ("2.00 (1.91 to 2.10)x", "contradicted")
    assert found(on_eight)[OVER_HYBRID][1] == "shown"
    assert next(of_times(replace(on_eight, model="cnn"))).claim == OVER_ONE + HERE


def test_claims_on_dp_its_communication_and_the_labels_of_figure_6() -> None:
    linear = "DP is near-linear (at least 90% of it) up to 4 GPUs"
    one = measured(BASE | {"adaptive": [6.0, 6.1, 5.9], "figure 6": [9.0, 9.1, 8.9]}, {})
    rows = found(one)
    assert rows[linear] == ("0.83 (0.80 to 0.87) of linear", "contradicted")
    quick = measured(BASE | {"adaptive": [6.0, 6.1], "DP": [5.1, 5.12, 5.08]}, {})
    assert found(quick)[linear] == ("0.98 (0.96 to 1.01) of linear", "shown")
    assert linear not in found(replace(one, ranks=8))
    labels = "attention MP, MLP DP, embedding HP (figure 6) is the best choice for a ViT"
    assert rows[labels][0].endswith("x of DP")
    assert rows[labels][1] == "contradicted"
    shares = {"DP": (4.0, 4.2, 3.8), "adaptive": (2.7, 2.8, 2.6)}
    timed = dict(one.timed)
    for name, exposed in shares.items():
        timed[name] = [
            replace(run, exposed=seconds, train_seconds=10.0)
            for run, seconds in zip(timed[name], exposed, strict=True)
        ]
    less = "adaptive communicates for less of the time (27.1 and 25.3 %) than DP (42.3, 38.7 %)"
    text, verdict = found(replace(one, timed=timed))[less]
    assert text.startswith("27.0% and 40.0%, a ratio of 1.48 (")
    assert verdict == "shown"
    assert found(one)[less][1] != "shown"  # both communicate as long


def test_a_gain_is_compared_between_models_of_a_family() -> None:
    small = replace(measured(BASE | {"adaptive": [5.0, 5.1, 4.9]}, {}), model="vit_tiny")
    large = replace(measured(BASE | {"adaptive": [4.0, 4.1, 3.9]}, {}), model="vit_b16")
    other = replace(small, model="resnet50")
    (row,) = of_sizes([small, large, other])
    assert (row.model, row.verdict) == ("vit_tiny, vit_b16", "shown")
    assert row.result.startswith("1.25 (")
    # The runs of both strategies vary.
    varied = measured({"adaptive": [2.0, 4.0, 8.0]}, {}).timed["adaptive"]
    (row,) = of_sizes([small, replace(large, timed={**large.timed, "adaptive": varied})])
    assert row.verdict == "not shown"
    without = replace(large, timed={"DP": large.timed["DP"]})
    assert list(of_sizes([small, without])) == []
    swapped = [replace(small, model="vit_b16"), replace(large, model="vit_tiny")]
    (row,) = of_sizes(swapped)
    assert row.verdict == "contradicted"


def test_predictions_judge_claims_on_more_ranks_than_there_are() -> None:
    rows = {row.claim: row for row in of_predictions([predict("vit_b16")])}
    assert len(rows) == 6
    assert rows[OVER_ONE].verdict == "not shown (a prediction agrees)"
    steady = rows["MP scales more steadily than DP"]
    assert steady.verdict == "not shown (a prediction disagrees)"
    assert "predicted for up to 8 V100" in steady.obtained


def test_a_strategy_that_learns_faster_converges_faster() -> None:
    def trained(start: float) -> list[Result]:
        """Return runs of two epochs; the second one is the same for all."""
        return [
            replace(
                run,
                accuracy=0.7,
                epochs=tuple(
                    Epoch(number, 1.0, 1.0, accuracy + seed / 1000)
                    for number, accuracy in enumerate((start, 0.7), 1)
                ),
            )
            for seed, run in enumerate(measured(BASE, {}).timed["DP"])
        ]

    one = replace(measured(BASE, {}), accuracy={"single": trained(0.5), "adaptive": trained(0.6)})
    final, faster = of_accuracies(one)
    assert (final.verdict, faster.verdict) == ("shown", "shown")
    assert faster.result.startswith("+5.00 (")
    same = replace(one, accuracy={"single": trained(0.5), "adaptive": trained(0.5)})
    assert list(of_accuracies(same))[1].verdict == "not shown"


def test_hours_are_those_of_the_papers_epochs() -> None:
    table = time_table(measured(BASE | {"adaptive": [5.0, 5.0]}, {}))
    row = next(line for line in table.splitlines() if line.startswith("| DP"))
    assert [cell.strip() for cell in row.split("|")][4:6] == [
        "6.0 (5.7 to 6.3)",
        "1.67 (1.60 to 1.73)",
    ]


def test_an_optimum_of_its_own_is_measured_only_if_its_runs_were_made() -> None:
    optima = {
        "as printed": Optimum({"a": (0,), "b": (0,)}, 1.0),
        "with divided work": Optimum({"a": (0, 1), "b": (0,)}, 0.5),
    }
    printed, divided = objective_lines(replace(measured(BASE, {}), optima=optima)).splitlines()
    assert "Measured (row single): 460 ms" in printed
    assert "A plan of its own, which was not measured." in divided
    run = measured(BASE | {"objective": [3.0]}, {})
    assert "Measured (row objective): 138 ms" in objective_lines(replace(run, optima=optima))


def test_an_accuracy_is_equivalent_only_if_that_is_shown() -> None:
    accuracy = {
        "single": [0.700, 0.701, 0.699],
        "DP": [0.700, 0.701, 0.700],
        "MP": [0.70, 0.72, 0.68],
        "adaptive": [0.710, 0.711, 0.709],
    }
    one = measured(BASE | {"adaptive": [5.0, 5.1]}, accuracy)
    shown = {
        line.split("|")[1].strip(): line.split("|")[4].strip()
        for line in accuracy_table(one).splitlines()[2:]
    }
    assert shown == {"single": "-", "DP": "shown", "MP": "not shown", "adaptive": "not shown"}
    verdicts = {row.result.partition(":")[0]: row.verdict for row in of_accuracies(one)}
    assert {name: verdicts[name] for name in ("DP", "MP", "adaptive")} == {
        "DP": "shown",
        "MP": "not shown",
        "adaptive": "contradicted",
    }
    single_run = measured(BASE | {"adaptive": [5.0]}, {name: [0.7] for name in accuracy})
    assert "nan" not in accuracy_table(single_run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": "resnet19"}, "unknown model 'resnet19'"),
        ({"models": "resnet50@0"}, "--models resnet50@0 is not valid"),
        ({"timed_models": "resnet50@2000"}, "--timed-models resnet50@2000 is not valid"),
        ({"ranks": "1"}, "--ranks 1 is not valid: give numbers between 2 and 64"),
        ({"ranks": "2,65"}, "--ranks 2,65 is not valid"),
        ({"ranks": "two"}, "--ranks two is not valid"),
        ({"ranks": ""}, "--ranks  is not valid"),
        ({"repeats": 0}, "--repeats must be at least 1, not 0"),
        ({"steps": 2}, "--steps must be at least 3, not 2"),
        ({"epochs": -1}, "--epochs must be at least 0, not -1"),
        ({"seeds": 0}, "--seeds must be at least 1, not 0"),
        ({"batch_size": 3, "ranks": "4,2"}, "--batch-size must be at least --ranks, 4, not 3"),
    ],
)
def test_options_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PaperBOptions(data="d", to="t", **change).check()


def test_models_may_have_a_size_of_images() -> None:
    options = PaperBOptions(data="d", to="t", models="vit_tiny", timed_models="resnet50@224")
    vit, resnet = ModelAtSize("vit_tiny", None), ModelAtSize("resnet50", 224)
    assert options.check().trained == [vit, resnet] and options.with_accuracy == [vit]
    assert [model.key for model in options.trained] == ["vit_tiny", "resnet50@224"]
    assert (options.steps_of(vit), options.steps_of(resnet)) == (8, 4)
    assert replace(options, models="none", timed_models="none").trained == []
    assert replace(options, timed_models="vit_tiny,vit_tiny").trained == [vit]


def test_ranks_are_those_that_have_a_device() -> None:
    options = PaperBOptions(data="d", to="t")
    assert set(options.numbers_of_ranks) <= {2, 4, 8} and max(options.numbers_of_ranks) <= max(
        2, devices()
    )
    assert replace(options, ranks="4,2,4").numbers_of_ranks == [2, 4]


INDEX = Index(
    Path("somewhere"), 1, {}, tuple(map(str, range(100))), (32, 32, 3), (0.5,) * 3, (0.2,) * 3
)


def test_large_models_have_fewer_images_per_step() -> None:
    options = PaperBOptions(data="d", to="t")
    images = {
        model.key: Case(options, INDEX, model, 2).images_per_step for model in options.trained
    }
    assert images == {
        "resnet18": 64,
        "vit_tiny": 64,
        "resnet50": 16,
        "vit_b16": 8,
        "resnet50@224": 8,
        "vit_b16@224": 8,
    }


def test_all_numbers_of_ranks_share_the_runs_of_one_rank(tmp_path: Path) -> None:
    options = PaperBOptions(
        data="d", to=str(tmp_path), models="cnn", timed_models="none", ranks="2,4"
    )
    two, four = (Case(options, INDEX, options.trained[0], ranks) for ranks in (2, 4))
    on_one_rank = Optimum(dict.fromkeys([cost.name for cost in two.costs], (0,)), 1)
    on_two, on_four = two.timed(on_one_rank), four.timed(on_one_rank)
    assert on_two["single"] == on_four["single"] and on_two["single"].key == "timed-cnn-single-1"
    assert len({arm.key for arms in (on_two, on_four) for arm in arms.values()}) == 2 * 5 - 1
    # Accuracy is that of the most ranks, on all cores, and of the strategies of table I.
    assert two.accuracy(on_two) == {}
    accuracy = four.accuracy(on_four)
    assert list(accuracy) == ["single", "DP", "MP", "hybrid", "adaptive"]
    assert {arm.ranks for arm in accuracy.values()} == {1, 4}
    assert {arm.config.threads for arm in accuracy.values()} == {None}
    for arm in (*on_two.values(), *on_four.values()):
        assert arm.config.threads == 1 and not arm.config.epochs
        assert arm.config.bind == (arm.ranks <= devices())
        arm.config.check()


@pytest.mark.parametrize(
    ("mp", "verdict"),
    [
        ([100.0, 101.0], "shown"),
        ([199.0, 201.0], "not shown"),
        ([300.0, 301.0], "contradicted"),
        ([100.0], "not shown (one run of each)"),
    ],
)
def test_memory_is_compared_by_its_interval(mp: list[float], verdict: str) -> None:
    def held(values: list[float]) -> list[Result]:
        return [
            run
            for value in values
            for run in runs([1.0], step_seconds=1.0, peak_memory_bytes=value)
        ]

    timed = {name: held([200.0, 200.0]) for name in ("single", "DP", "hybrid", "adaptive")}
    rows = found(Measured("m", 2, timed | {"MP": held(mp)}, {}))
    assert rows["MP needs less memory per device than DP"][1] == verdict
