"""The paper's objective: its exact optimum, against all assignments of small models."""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from hvdtrain.plan.plan import Plan
from hvdtrain.planner.assign import groups_of
from hvdtrain.planner.clusters import load, question_of
from hvdtrain.planner.cost import Known, Question
from hvdtrain.study.paper_b.plans import (
    AS_PRINTED,
    DIVIDED,
    DP,
    OBJECTIVE,
    SINGLE,
    Group,
    Optimum,
    minimise,
    plan_of,
)
from tests.pure.planner.test_clusters import costs_of

BATCH = 64


def make_question(components: int, ranks: int, cluster: str = "8-v100") -> Question:
    costs = costs_of("resnet18")[-components:]
    return replace(question_of(load(cluster, ranks), costs, BATCH, "sgd"), limits=None)


def hand_over(known: Known, before: Group, behind: Group, size: float) -> float:
    """Return the seconds of a tensor in the forward and of its gradient in the backward.

    Each rank of a group holds an equal part of the rows, and receives what it lacks, piece by
    piece; a message is under way for its latency, and then its receiver is busy with it.
    """
    held = {
        group: {
            rank: set(range(place * 12 // len(group), (place + 1) * 12 // len(group)))
            for place, rank in enumerate(group)
        }
        for group in (before, behind)
    }
    seconds = latest = 0.0
    for senders, receivers in ((before, behind), (behind, before)):
        busy = [0.0]
        for receiver in receivers:
            lacking = 0.0
            for sender in senders:
                rows = len(held[senders][sender] & held[receivers][receiver])
                if sender != receiver and rows:
                    latency = known.network.send_seconds(sender, receiver, 1)
                    whole = known.network.send_seconds(sender, receiver, size * rows / 12)
                    lacking += whole - latency
                    latest = max(latest, latency)
            busy.append(lacking)
        seconds += max(busy)
    return seconds + 2 * latest


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
@pytest.mark.parametrize(("ranks", "components"), [(2, 5), (4, 3)])
@pytest.mark.parametrize("cluster", ["8-v100", "16-cpu-10g"])
def test_no_assignment_is_better(reading: str, ranks: int, components: int, cluster: str) -> None:
    question = make_question(components, ranks, cluster)
    known = question.known
    names = [cost.name for cost in known.costs]
    best = min(
        value(known, dict(zip(names, groups, strict=True)), reading)
        for groups in itertools.product(groups_of(ranks), repeat=components)
    )
    optimum = minimise(question, reading == DIVIDED)
    assert optimum.seconds == pytest.approx(best, rel=1e-6)
    assert value(known, optimum.groups, reading) == pytest.approx(best, rel=1e-6)


def test_as_printed_everything_is_on_one_device() -> None:
    optimum = minimise(make_question(6, 4), divides=False)
    assert len(set(optimum.groups.values())) == 1
    assert optimum.same_as(4) == SINGLE


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
