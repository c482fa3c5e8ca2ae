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
from hvdtrain.study.paper_b.plans import Case, Measured, Optimum, verdicts
from hvdtrain.study.paper_b.report import accuracy_table, objective_lines, time_table
from hvdtrain.study.results import Result
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


@pytest.mark.parametrize(
    ("adaptive", "phrases"),
    [
        (
            [5.0, 5.1, 4.9],
            ["2.00", "1.40", "(1.14 to 1.26)x over the best static one, DP: the"],
        ),
        ([6.0, 6.05, 5.95], ["1.67", "DP: within the noise"]),
        ([6.5, 6.55, 6.45], ["1.08 (1.04 to 1.11)x on 2 ranks: faster, by less than claimed"]),
        ([12.0, 12.1, 11.9], ["0.83", "the claim does not hold here"]),
        ([5.0], ["one run of each cannot tell"]),
    ],
)
def test_a_claim_holds_only_if_the_interval_says_so(
    adaptive: list[float], phrases: list[str]
) -> None:
    lines = verdicts(measured(BASE | {"adaptive": adaptive}, {}))
    assert len(lines) == 4  # accuracy was left out
    text = "\n".join(lines)
    for phrase in phrases:
        assert phrase in text
    over_single, over_hybrid, *_ = text.splitlines()
    # Two ranks say nothing of 3.8x on eight GPUs.
    is_faster = adaptive[0] < 10 and len(adaptive) > 1
    assert ("faster, and how much is claimed for 8 GPUs only" in over_single) == is_faster
    assert ("the claim holds here" in over_hybrid) == (adaptive[0] < 6.5 and is_faster)


def test_hours_are_those_of_the_papers_epochs() -> None:
    table = time_table(measured(BASE | {"adaptive": [5.0, 5.0]}, {}))
    row = next(line for line in table.splitlines() if line.startswith("| DP"))
    assert [cell.strip() for cell in row.split("|")][4:6] == [
        "6.0 (5.7 to 6.3)",
        "1.67 (1.60 to 1.73)",
    ]


def test_an_optimum_of_its_own_is_measured_only_if_its_runs_were_made() -> None:
    """A large model is trained by the strategies of table I only."""
    optima = {
        "as printed": Optimum({"a": (0,), "b": (0,)}, 1.0),
        "with divided work": Optimum({"a": (0, 1), "b": (0,)}, 0.5),
    }
    printed, divided = objective_lines(replace(measured(BASE, {}), optima=optima)).splitlines()
    assert "Measured (row single): 460 ms" in printed
    assert "Not measured: this model is trained by the strategies of table I only." in divided
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
    assert verdicts(one)[-1].endswith("not shown for MP, adaptive")
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
        ([100.0, 101.0], "the claim holds here"),
        ([199.0, 201.0], "within the noise"),
        ([300.0, 301.0], "the claim does not hold here"),
        ([100.0], "one run of each cannot tell"),
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
    lines = verdicts(Measured("m", 2, timed | {"MP": held(mp)}, {}))
    assert lines[-1].endswith(verdict)


def test_a_size_is_compared_on_as_many_ranks_as_the_paper_has() -> None:
    one = measured(BASE | {"adaptive": [5.0, 5.1, 4.9]}, {})
    line, *_ = verdicts(replace(one, ranks=8))
    assert line.endswith("2.00 (1.91 to 2.10)x on 8 ranks: faster, by less than claimed")
