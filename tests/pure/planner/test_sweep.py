"""Predictions on 1, 2, 4, ... ranks: one replica stands for all, and other plans win on more."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.plan.plan import pipeline, replicated
from hvdtrain.planner import clusters
from hvdtrain.planner.candidate import play
from hvdtrain.planner.clusters import load, question_of
from hvdtrain.planner.cost import Question
from hvdtrain.planner.network import FreeNetwork
from hvdtrain.planner.options import PlanConfig
from hvdtrain.planner.strategies import IMAGES
from hvdtrain.planner.sweep import (
    Sweep,
    check,
    check_alike,
    numbers_of_ranks,
    one_replica,
    sweep,
)
from tests.pure.planner.test_clusters import costs_of


def question(ranks: int, cluster: str = "16-cpu-10g", batch_size: int = 64) -> Question:
    return question_of(load(cluster, ranks), costs_of("resnet18"), batch_size, "sgd")


@pytest.mark.parametrize(("stages", "number"), [(1, 1), (2, 4), (4, 8), (8, 8)])
def test_one_replica_takes_as_long_as_the_whole_plan(stages: int, number: int) -> None:
    problem = question(8)
    names = problem.known.profile.names
    work = [cost.forward_flops for cost in problem.known.costs]
    plan = replicated(names, 8, number, None)
    if stages > 1:
        plan = pipeline(names, work, 8, stages, 8 // stages, number, "1f1b")
    whole, one = play(problem, plan, ""), one_replica(problem, plan)
    assert one.seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert max(one.rank_bytes) == pytest.approx(max(whole.rank_bytes), rel=1e-9)
    free = replace(problem.known, network=FreeNetwork(problem.known.network.hosts))
    assert one_replica(replace(problem, known=free), plan).seconds < 0.999 * whole.seconds


def test_the_point_where_another_plan_wins_is_named() -> None:
    """Pipelines win on many ranks of a slow network."""
    swept = sweep("resnet18", question, 16)
    assert list(swept.points) == [1, 2, 4, 8, 16]
    winners = swept.winners()
    assert len(set(winners.values())) > 1
    first = next(one for before, one in pairwise(winners) if winners[before] != winners[one])
    line = next(swept.remarks())
    assert line.startswith(f"from {first} ranks on, {winners[first]} (")
    entries = swept.points[first]
    assert entries[winners[first]].seconds <= min(
        entry.seconds for name, entry in entries.items() if name != "chosen"
    )
    assert swept.as_json()["points"][0]["ranks"] == 1
    assert line in swept.as_text()


def test_costs_count_all_ranks_and_their_price() -> None:
    swept = sweep("resnet18", question, 2)
    hours = 100 * -(-IMAGES // 64) * swept.points[2]["dp"].seconds / 3600
    assert swept.costs("dp")[2] == pytest.approx(2 * hours)
    priced = Sweep(swept.model, swept.batch_size, swept.points, price=3.0)
    assert priced.costs("dp")[2] == pytest.approx(6 * hours)
    assert (swept.unit, priced.unit) == ("rank-hours", "price")


def test_sizes_on_which_nothing_fits_are_left_out() -> None:
    """Eight ranks have the memory for a batch that one does not have."""
    cluster = replace(load("16-cpu-10g", 8), memory_gib=0.25)

    def small(ranks: int) -> Question:
        return question_of(replace(cluster, ranks=ranks), costs_of("resnet18"), 512, "sgd")

    points = sweep("resnet18", small, 8).points
    assert 1 not in points
    assert 8 in points
    assert "dp" not in points[min(points)]


def test_a_cluster_with_events_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    numbers = "ranks: 8, ranks_per_node: 8, gflops: 1, memory_gbytes: 1, memory_gib: 1, gbytes: 1"
    file.write_text(f"{{{numbers}}}")
    check_alike(str(file), 8)
    file.write_text(f"{{{numbers}, events: [{{slows: devices, factor: 2, ranks: [3]}}]}}")
    with pytest.raises(UsageError, match=r"--sweep needs ranks that are alike, and .* has events"):
        check_alike(str(file), 8)


def test_numbers_double_up_to_the_most() -> None:
    assert numbers_of_ranks(1) == [1]
    assert numbers_of_ranks(6) == [1, 2, 4, 6]
    assert numbers_of_ranks(8) == [1, 2, 4, 8]
    assert numbers_of_ranks(clusters.MOST_RANKS)[-2:] == [512, 1024]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sweep": True}, "--sweep predicts for a cluster: add --cluster"),
        ({"price": 2.0}, "--price 2 needs --sweep: add it, or leave it out"),
        ({"sweep": True, "cluster": "8-v100", "plan": "dp"}, "leave --plan dp out"),
        ({"sweep": True, "cluster": "8-v100", "price": 0.0}, "--price must be above 0, not 0"),
        ({"sweep": True, "cluster": "8-v100", "save": "p.json"}, "need one plan: leave --sweep"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: "dict[str, object]", message: str) -> None:
    config = PlanConfig(model="cnn", ranks=4, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        check(config)
