"""Predicted step times, against values worked out by hand."""

from dataclasses import replace

import pytest

from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan, Stage, pipeline, replicated
from hvdtrain.plan.schedule import training_step
from hvdtrain.plan.simulate import simulate
from hvdtrain.planner.cost import Known, plan_costs
from hvdtrain.planner.network import Contention
from hvdtrain.planner.profile import Profile
from tests.pure.planner.machines import component, known, network

COSTS = [component(number) for number in range(4)]
NAMES = [cost.name for cost in COSTS]


def seconds(plan: Plan, machine: Known, batch_size: int) -> float:
    pieces = cut(plan, batch_size)
    return simulate(
        training_step(plan, pieces), plan, pieces, plan_costs(plan, pieces, machine)
    ).seconds


def test_one_rank_takes_the_sum_of_its_components() -> None:
    machine = known(COSTS, [1, 2, 3, 4], [1], network(1))
    assert seconds(replicated(NAMES, 1, 1, None), machine, 8) == pytest.approx(3 * 10 * 8)


def test_replicas_take_their_share_and_what_no_backward_hides() -> None:
    """One bucket: its all-reduce can start only after the whole backward."""
    machine = known(COSTS, [1, 1, 1, 1], [1, 1], network(2, reduce_per_byte=0.5))
    assert seconds(replicated(NAMES, 2, 1, None), machine, 8) == pytest.approx(3 * 4 * 4 + 2000)


def test_the_slowest_replica_is_waited_for() -> None:
    machine = known(COSTS, [1, 1, 1, 1], [1, 2], network(2))
    even = replicated(NAMES, 2, 1, None)
    uneven = Plan((Stage(tuple(NAMES), (0, 1), (2, 1)),))
    assert seconds(even, machine, 12) == pytest.approx(3 * 4 * 6 * 2)
    assert seconds(uneven, machine, 12) == pytest.approx(3 * 4 * 8)


def test_a_pipeline_fills_and_hands_over() -> None:
    """GPipe: m + p - 1 micro-batches of each kind, and one transfer in each direction."""
    machine = known(COSTS, [1, 1, 1, 1], [1, 1], network(2, latency=0.25))
    plan = pipeline(NAMES, [1] * 4, 2, 2, 1, 4, "gpipe")
    assert seconds(plan, machine, 8) == pytest.approx((4 + 1) * 3 * 2 * 2 + 2 * 0.25)


def test_what_is_recomputed_runs_forward_twice() -> None:
    machine = known(COSTS, [1, 1, 1, 1], [1], network(1))
    again = Known(machine.costs, machine.profile, machine.network, {"part0", "part2"})
    plan = replicated(NAMES, 1, 1, None)
    assert seconds(plan, again, 8) == pytest.approx(3 * 4 * 8 + 2 * 8)


def test_synchronised_batch_norms_gather_once_each_way() -> None:
    """Four ranks need two hops."""
    normed = [replace(cost, batch_norms=number) for number, cost in enumerate(COSTS)]
    local = known(normed, [1, 1, 1, 1], [1] * 4, network(4, latency=0.25))
    together = replace(local, is_synchronised=True)
    plan = replicated(NAMES, 4, 1, None)
    gathers = 2 * (0 + 1 + 2 + 3) * 2 * 0.25
    assert seconds(plan, together, 8) == pytest.approx(seconds(plan, local, 8) + gathers)
    alone = pipeline(NAMES, [1] * 4, 2, 2, 1, 4, "gpipe")
    assert seconds(alone, together, 8) == seconds(alone, local, 8)


def test_a_component_that_moves_memory_is_slowed_down_more_beside_an_all_reduce() -> None:
    """Two buckets: the first is summed during the backward of the other two components."""
    slowed, summed = 3.0, Contention(compute=1.5, reduce=2.0)
    plain = known(COSTS, [1, 1, 1, 1], [1, 1], network(2, reduce_per_byte=0.01, contention=summed))
    ranks = tuple(
        replace(
            rank,
            components=dict(rank.components)
            | {"part1": replace(rank.components["part1"], contention=slowed)},
        )
        for rank in plain.profile.ranks
    )
    plan = replicated(NAMES, 2, 1, None)
    # Bytes are small enough for one bucket, which is summed after the backward: no difference.
    alike = replace(plain, profile=Profile(ranks))
    assert seconds(plan, alike, 8) == seconds(plan, plain, 8)
    large = [replace(cost, parameters=9_000_000, parameter_bytes=36_000_000) for cost in COSTS]
    before, after = (seconds(plan, replace(one, costs=large), 8) for one in (plain, alike))
    assert before < after
