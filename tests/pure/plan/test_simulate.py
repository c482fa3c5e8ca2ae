"""Simulated times equal those of publications and of cases computed by hand; they are drawn."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product

import pytest
from hypothesis import given, settings

from hvdtrain.plan import schedule
from hvdtrain.plan.cut import Action, cut
from hvdtrain.plan.plan import Plan, Stage
from hvdtrain.plan.simulate import (
    Costs,
    Deadlock,
    Reduction,
    Simulation,
    simulate,
    unit_costs,
)
from hvdtrain.plan.trace import Event
from tests.pure.parallel.plans import Case, a_pipeline, a_plan, cases
from tests.pure.plan.forms import from_text

SIZES = [*product((1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 8, 13))]


def run(plan: Plan, costs: Costs | None = None, batch_size: int = 48) -> Simulation:
    made = cut(plan, batch_size)
    return simulate(schedule.training_step(plan, made), plan, made, costs or unit_costs())


@pytest.mark.proves("Schedules have the bubbles and hold the activations that their table says.")
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_the_bubble_of_gpipe_and_1f1b_is_that_of_the_formula(
    ranks: int, microbatches: int
) -> None:
    for name in "gpipe", "1f1b":
        line = run(a_pipeline(name, ranks, microbatches))
        assert line.seconds == 3 * (microbatches + ranks - 1)
        assert line.bubble_fraction == float(Fraction(ranks - 1, microbatches + ranks - 1))
        held = run(a_pipeline(name, ranks, microbatches)).peak_in_flight
        for rank in range(ranks):
            limit = microbatches if name == "gpipe" else min(microbatches, ranks - rank)
            assert held[rank, rank] == limit


@pytest.mark.parametrize(("ranks", "microbatches"), [(p, m) for p, m in SIZES if m >= p])
def test_the_bubble_of_zb_h1_is_a_third_of_1f1bs_with_no_more_memory(
    ranks: int, microbatches: int
) -> None:
    line = run(a_pipeline("zb-h1", ranks, microbatches))
    assert line.seconds == 3 * microbatches + ranks - 1
    assert max(line.peak_in_flight.values()) <= ranks


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks"),
    [(p, m, v) for (p, m), v in product(SIZES, (2, 3)) if m >= p],
)
def test_the_bubble_of_interleaved_shrinks_by_the_chunks_of_a_rank(
    ranks: int, microbatches: int, chunks: int
) -> None:
    # A chunk takes 1 / chunks of the time of a whole stage.
    line = run(a_pipeline("interleaved", ranks, microbatches, chunks))
    assert line.seconds == 3 * (microbatches * chunks + ranks - 1)


@pytest.mark.parametrize(("forward", "backward"), [(1.0, 1.0), (2.0, 3.0), (1.0, 4.0)])
def test_the_formula_holds_at_other_costs(forward: float, backward: float) -> None:
    costs = unit_costs(forward, backward / 2, backward / 2)
    for name in "gpipe", "1f1b":
        assert run(a_pipeline(name, 4, 6), costs).bubble_fraction == 3 / 9


def test_hand_overs_and_reductions_take_their_time() -> None:
    # F 0-1, transfer 1-6, F 6-7, B 7-9, transfer 9-14, B 14-16, reduction 16-19.
    line = run(a_pipeline("1f1b", 2, 1), unit_costs(hand_over=5, reduce=3))
    assert line.events == (
        Event(0, Action(0, "LOAD", 0), 0, 0, "compute"),
        Event(0, Action(0, "F", 0), 0, 1, "compute"),
        Event(0, Action(0, "SEND_F", 0), 1, 1, "communication"),
        Event(0, Action(0, "RECV_B", 0), 1, 1, "communication"),
        Event(0, Action(0, "B", 0), 1, 14, "wait"),
        Event(0, Action(0, "B", 0), 14, 16, "compute"),
        Event(0, Action(0, "REDUCE"), 16, 16, "communication"),
        Event(0, Action(0, "STEP"), 16, 19, "wait"),
        Event(0, Action(0, "STEP"), 19, 19, "compute"),
        Event(1, Action(1, "RECV_F", 0), 0, 0, "communication"),
        Event(1, Action(1, "LOAD", 0), 0, 0, "compute"),
        Event(1, Action(1, "F", 0), 0, 6, "wait"),
        Event(1, Action(1, "F", 0), 6, 7, "compute"),
        Event(1, Action(1, "B", 0), 7, 9, "compute"),
        Event(1, Action(1, "SEND_B", 0), 9, 9, "communication"),
        Event(1, Action(1, "REDUCE"), 9, 9, "communication"),
        Event(1, Action(1, "STEP"), 9, 12, "wait"),
        Event(1, Action(1, "STEP"), 12, 12, "compute"),
    )


def slow_rank(rank: int, action: Action) -> float:
    return {"F": 1.0, "B": 2.0}.get(action.kind, 0.0) * (5 if rank == 1 else 1)


def test_a_reduction_begins_when_the_last_replica_has_come_to_it() -> None:
    line = run(
        a_plan((0, 1), microbatches=2), Costs(slow_rank, reduce=lambda stage: Reduction(7.0, 7.0))
    )
    assert {event.rank: event.end for event in line.events} == {0: 37.0, 1: 37.0}
    waits = [event for event in line.events if event.kind == "wait"]
    assert [event[2:4] for event in waits] == [(6, 37), (30, 37)]


@pytest.mark.parametrize(
    ("last", "whole", "exposed", "end"),
    [
        ((1,), 4.0, 3.0, 9.0),  # nothing is summed before
        ((0, 1), 4.0, 4.0, 12.0),  # the last stage from 4 to 8, then the first
        ((0, 1), 4.0, 1.0, 9.0),  # the last stage to 5, and the first to 9 in place of 7
        ((0, 1), 1.0, 0.5, 6.5),  # over before the backward of the first stage is
    ],
)
def test_ranks_sum_the_gradients_of_stages_one_after_another(
    last: tuple[int, ...], whole: float, exposed: float, end: float
) -> None:
    """Sums over the same link once took no longer together than alone."""
    stages = (Stage(("a",), (0, 1), (1, 1)), Stage(("b",), last, (1,) * len(last)))
    costs = replace(unit_costs(), reduce=lambda stage: Reduction(whole, exposed))
    assert run(Plan(stages), costs).seconds == end


def test_synchronised_replicas_start_each_forward_and_backward_together() -> None:
    plan = a_plan((0, 1), microbatches=2)
    made = cut(plan, 4)
    steps = schedule.training_step(plan, made)
    line = simulate(steps, plan, made, Costs(slow_rank), synchronised={0})
    starts = [
        [e.start for e in line.events if e.rank == rank and e[1].kind in "FB" and e[4] != "wait"]
        for rank in (0, 1)
    ]
    assert starts[0] == starts[1] == [0, 5, 15, 20]


def test_under_rendezvous_a_send_blocks_until_its_receipt_is_posted() -> None:
    plan, made = a_pipeline("1f1b", 2, 1), cut(a_pipeline("1f1b", 2, 1), 1)
    steps = from_text("0: 0F0 0SEND_F0\n1: 0LOAD0 1RECV_F0 1F0")
    costs = Costs(lambda rank, action: {"LOAD": 9.0}.get(action.kind, 1.0))
    eager = simulate(steps, plan, made, costs)
    blocking = simulate(steps, plan, made, costs, rendezvous=True)
    assert [e[2:] for e in eager.events if e[1].kind == "SEND_F"] == [(1, 1, "communication")]
    assert [e[2:] for e in blocking.events if e[1].kind == "SEND_F"] == [
        (1, 9, "wait"),
        (9, 9, "communication"),
    ]


def test_a_deadlock_names_each_stuck_rank_and_what_it_waits_for() -> None:
    plan = a_pipeline("1f1b", 2, 2)
    steps = from_text("0: 0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1\n1: 1RECV_F0 1RECV_F1 1F1 1F0")
    with pytest.raises(Deadlock) as caught:
        simulate(steps, plan, cut(plan, 2), unit_costs())
    assert str(caught.value) == (
        "deadlock: rank 0 at 0B0 waits for 1SEND_B0 on rank 1; "
        "rank 1 at 1F1 waits for 0SEND_F1 on rank 0"
    )
    assert caught.value.stuck[0][0] == Action(0, "B", 0)


def test_the_peak_weighs_activations_of_several_stages_at_once() -> None:
    plan = a_plan((0,), (0,), microbatches=3)
    line = run(plan)
    assert line.peak_in_flight == {(0, 0): 1, (0, 1): 1}
    assert line.peak(lambda rank, forward: 10.0 + forward.stage) == {0: 21.0}
    assert run(a_plan((0,), microbatches=1), unit_costs(0, 0, 0)).peak_in_flight == {(0, 0): 1}


def test_a_timeline_of_nothing_took_no_time() -> None:
    assert (Simulation(()).seconds, Simulation(()).bubble_fraction) == (0.0, 0.0)


@settings(max_examples=100, deadline=None)
@given(cases)
def test_a_rank_does_its_list_without_gaps_or_overlaps_and_rendezvous_is_never_faster(
    case: Case,
) -> None:
    plan, batch_size = case
    made = cut(plan, batch_size)
    steps = schedule.training_step(plan, made)
    costs = unit_costs(1.0, 2.0, 1.0, hand_over=0.5, reduce=2.0)
    eager = simulate(steps, plan, made, costs)
    blocking = simulate(steps, plan, made, costs, rendezvous=True)
    together = simulate(steps, plan, made, costs, synchronised=set(range(len(plan.stages))))
    assert eager.seconds <= min(blocking.seconds, together.seconds)
    for rank in plan.ranks:
        events = [event for event in eager.events if event.rank == rank]
        assert [event.action for event in events if event.kind != "wait"] == steps[rank]
        assert events[0].start == 0
        assert all(first.end == second.start for first, second in pairwise(events))
