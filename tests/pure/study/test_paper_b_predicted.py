"""Paper B's numbers, and our prediction of its table I beside them."""

from dataclasses import replace
from functools import cache

import pytest

from hvdtrain.plan.plan import replicated
from hvdtrain.planner import clusters
from hvdtrain.planner.candidate import play
from hvdtrain.planner.strategies import communication
from hvdtrain.study.paper_b import predicted
from hvdtrain.study.paper_b.claims import (
    CONTRADICTIONS,
    POINTS,
    PUBLISHED,
    STATED_SPEEDUP,
    STRATEGIES,
)
from hvdtrain.study.paper_b.predicted import (
    QUANTITIES,
    SETTINGS,
    Prediction,
    Setting,
    bandwidth_for,
    predict,
    reasons,
    section,
    speedup_table,
    table_of,
)
from tests.pure.planner.test_clusters import costs_of

SETTING = Setting(64, "sgd")


@cache
def prediction() -> Prediction:
    return predict("vit_b16")


def dp_share(gbytes: float) -> float:
    """Return the part of a step that DP of ResNet-50 communicates on 8 V100 with such links."""
    cluster = replace(clusters.load("8-v100"), gbytes=gbytes)
    question = clusters.question_of(cluster, costs_of("resnet50"), 64, "sgd")
    plan = replicated(question.known.profile.names, 8, None, None)
    return communication(question, play(question, plan, "DP"))


def test_the_paper_derives_its_images_per_second() -> None:
    derived = {
        "resnet50": (56.5, 169, 109, 183, 214),
        "vit_b16": (36.2, 95, 76, 105, 117),
    }
    for model, values in derived.items():
        published = PUBLISHED[model]
        for name, value in zip(STRATEGIES, values, strict=True):
            assert published.images_per_second(name) == pytest.approx(value, rel=0.005)
        accuracies = published.accuracy.values()
        assert max(accuracies) - min(accuracies) <= POINTS
        assert published.speedup("adaptive") == pytest.approx(STATED_SPEEDUP[model], abs=0.05)


def test_contradictions_name_both_numbers() -> None:
    text = "\n".join(CONTRADICTIONS)
    for words in ("1.18x", "1.17x and 1.11x", "2.91x", "37.9 GPU-hours", "14.2 against 12.8 GB"):
        assert words in text


@pytest.mark.parametrize("share", [0.423, 0.1])
def test_the_search_finds_the_bandwidth_of_a_share(share: float) -> None:
    costs, cluster = costs_of("resnet50"), clusters.load("8-v100")
    gbytes = bandwidth_for(share, cluster, costs, SETTING)
    assert dp_share(gbytes) == pytest.approx(share, abs=1e-3)
    assert dp_share(1.1 * gbytes) < share - 1e-3
    assert dp_share(gbytes / 1.1) > share + 1e-3


def test_a_search_that_looks_at_another_network_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the search must use the bandwidth that it tries."""
    right = predicted._dp_share
    monkeypatch.setattr(predicted, "_dp_share", lambda gbytes, *others: right(gbytes / 2, *others))
    gbytes = bandwidth_for(0.423, clusters.load("8-v100"), costs_of("resnet50"), SETTING)
    assert abs(dp_share(gbytes) - 0.423) > 0.1


@pytest.mark.parametrize(("share", "message"), [(1e-9, "no bandwidth"), (1.0, "no bandwidth")])
def test_a_share_that_no_bandwidth_has_is_refused(share: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bandwidth_for(share, clusters.load("8-v100"), costs_of("resnet50"), SETTING)


def test_the_table_has_the_papers_numbers_beside_ours() -> None:
    rows = {
        line.split(" | ")[0].strip("| "): [cell.strip(" |") for cell in line.split(" | ")[1:]]
        for line in table_of(prediction()).splitlines()
    }
    assert rows[""] == list(STRATEGIES)
    assert rows["hours, paper"] == ["38.4", "14.6", "18.2", "13.2", "11.9"]
    assert rows["memory (GB), paper"] == ["28.4", "30.1", "9.8", "12.4", "13.6"]
    assert rows["communication, paper"] == ["0.0%", "38.7%", "22.4%", "29.8%", "25.3%"]
    assert rows["speed-up, paper"] == ["1.00", "2.63", "2.11", "2.91", "3.23"]
    ours = list(map(float, rows["hours, predicted"]))
    assert ours[-1] == min(ours)
    assert ours[0] == max(ours)
    steps = 100 * -(-50_000 // 256)
    seconds = prediction().table.columns[1].candidate.seconds
    assert ours[1] == pytest.approx(steps * seconds / 3600, rel=0.01)
    assert speedup_table(prediction()).splitlines()[2] == "| 1 | 1.00 | - | - | 1.00 |"


def test_the_batch_is_the_power_of_two_whose_memory_is_closest() -> None:
    model, paper = "vit_b16", PUBLISHED["vit_b16"].memory_gb["single"]
    single = prediction().table.columns[0].candidate
    assert SETTINGS[model].batch_size == single.overview.cut.batch_size
    memory = prediction().memory_gb("single")
    lasting = 4 * 4 * prediction().parameters / 1e9  # weights, gradients and AdamW's two copies
    half, double = ((memory - lasting) * factor + lasting for factor in (0.5, 2))
    assert abs(memory - paper) < min(abs(half - paper), abs(double - paper))


def test_numbers_far_from_the_papers_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = reasons(prediction())
    assert [line.split(",")[0] for line in lines] == list(QUANTITIES)
    assert f"{prediction().link_gbytes:.3g} GB/s" in lines[-1]
    assert "single" not in lines[0]  # within 2x
    text = section([prediction()])
    assert "predictions" in text
    assert table_of(prediction()) in text
    assert all(line in text for line in lines)
    monkeypatch.setattr(predicted, "FACTOR", 1000)
    assert reasons(prediction()) == []
