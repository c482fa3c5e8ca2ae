"""The paper's objective: its exact optimum, against all assignments of small models."""

import itertools
from collections.abc import Mapping

import pytest

from hvdtrain.plan.plan import Plan
from hvdtrain.planner.clusters import ClusterNetwork, load, question_of
from hvdtrain.planner.cost import Known
from hvdtrain.study.paper_b.plans import (
    AS_PRINTED,
    DIVIDED,
    DP,
    OBJECTIVE,
    SINGLE,
    Group,
    Optimum,
    groups_of,
    hand_over,
    minimise,
    plan_of,
)
from tests.pure.planner.test_clusters import costs_of

BATCH = 64


def known_of(components: int, ranks: int, cluster: str = "8-v100") -> Known:
    costs = costs_of("resnet18")[-components:]
    return question_of(load(cluster, ranks), costs, BATCH, "sgd").known


def value(known: Known, groups: Mapping[str, Group], reading: str) -> float:
    """Return the objective of an assignment, written down independently of the search."""
    total, before = 0.0, None
    for cost in known.costs:
        group = groups[cost.name]
        rows = BATCH / len(group) if reading == DIVIDED else BATCH
        times = known.profile.ranks[0].components[cost.name]  # all ranks are alike
        total += times.forward(rows) + times.backward(rows) + times.update
        total += known.network.reduce_seconds(group, cost.parameter_bytes)
        if before is not None:
            size = known.by_name[before].output_bytes * BATCH
            total += hand_over(known, groups[before], group, size)
        before = cost.name
    return total


@pytest.mark.proves("The paper's printed objective is minimised exactly, in both readings.")
@pytest.mark.parametrize("reading", [AS_PRINTED, DIVIDED])
@pytest.mark.parametrize(("ranks", "components"), [(2, 5), (4, 4)])
@pytest.mark.parametrize("cluster", ["8-v100", "16-cpu-10g"])
def test_no_assignment_is_better(reading: str, ranks: int, components: int, cluster: str) -> None:
    known = known_of(components, ranks, cluster)
    names = [cost.name for cost in known.costs]
    best = min(
        value(known, dict(zip(names, groups, strict=True)), reading)
        for groups in itertools.product(groups_of(ranks), repeat=components)
    )
    optimum = minimise(known, ranks, BATCH, reading)
    assert optimum.seconds == pytest.approx(best)
    assert value(known, optimum.groups, reading) == pytest.approx(best)


def test_as_printed_everything_is_on_one_device() -> None:
    optimum = minimise(known_of(6, 4), 4, BATCH, AS_PRINTED)
    assert set(optimum.groups.values()) == {(0,)}
    assert optimum.same_as(4) == SINGLE


def test_rows_that_stay_on_their_rank_are_not_sent() -> None:
    known = known_of(2, 4)
    network = ClusterNetwork(load("8-v100", 4))
    whole = network.send_seconds(0, 1, 1e6)
    assert hand_over(known, (0, 1), (0, 1), 1e6) == 0
    assert hand_over(known, (0,), (1,), 1e6) == pytest.approx(2 * whole)
    # Rank 0 keeps its half and rank 1 gets one.
    half = network.send_seconds(0, 1, 5e5)
    assert hand_over(known, (0,), (0, 1), 1e6) == pytest.approx(2 * half)
    quarter = network.send_seconds(0, 1, 2.5e5)
    # Forward each rank gets a quarter at most; backward rank 1 gets those of ranks 2 and 3.
    assert hand_over(known, (0, 1), (0, 1, 2, 3), 1e6) == pytest.approx(3 * quarter)
    assert hand_over(known, (0, 1, 2, 3), (0, 1), 1e6) == pytest.approx(3 * quarter)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([(0, 1, 2, 3), (0, 1, 2, 3)], DP),
        ([(0, 1), (2, 3)], OBJECTIVE),
        ([(0,), (0,)], SINGLE),
        ([(0, 1), (0, 1)], None),
        ([(0,), (1,)], None),
    ],
)
def test_an_optimum_that_is_another_strategy_is_not_run_again(
    groups: list[Group], expected: str | None
) -> None:
    optimum = Optimum({f"part{place}": group for place, group in enumerate(groups)}, 1.0)
    assert optimum.same_as(4) == expected
    plan = plan_of(OBJECTIVE, [], 4, optimum)
    assert (plan is not None) == (expected == OBJECTIVE)
    if isinstance(plan, Plan):
        assert plan.microbatches == 1
        assert [stage.ranks for stage in plan.stages] == groups


def test_the_groups_of_a_few_ranks_are_those_of_the_paper() -> None:
    assert groups_of(2) == [(0,), (1,), (0, 1)]
    assert (2, 3) in groups_of(4)
