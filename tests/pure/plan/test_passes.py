"""Passes: schedules before and after each."""

import pytest
from hypothesis import given, settings

from hvdtrain.plan import schedule
from hvdtrain.plan.cut import Cut, Schedule, ScheduleError, cut
from hvdtrain.plan.plan import Plan
from tests.pure.parallel.plans import Case, a_plan, cases
from tests.pure.plan.forms import from_text, to_text

TWO = a_plan((0,), (1,), microbatches=2)


def lines(steps: Schedule) -> list[str]:
    return to_text(steps).splitlines()


def exchanged(plan: Plan, *text: str, batch_size: int = 4) -> list[str]:
    return lines(schedule.add_exchange(from_text("\n".join(text)), plan, cut(plan, batch_size)))


def test_the_sender_places_the_receipt_when_the_data_is_there() -> None:
    assert exchanged(TWO, "0: 0F0 0F1 0B0 0B1", "1: 1F0 1B0 1F1 1B1") == [
        "0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_halves_send_after_the_input_half() -> None:
    assert exchanged(TWO, "0: 0F0 0B0", "1: 1F0 1I0 1W0") == [
        "0: 0F0 0SEND_F0 0RECV_B0 0B0",
        "1: 1RECV_F0 1F0 1I0 1SEND_B0 1W0",
    ]


def test_what_stays_on_a_rank_is_not_sent() -> None:
    plan = a_plan((0,), (0,), (1,), microbatches=1)
    assert exchanged(plan, "0: 0F0 1F0 1B0 0B0", "1: 2F0 2B0") == [
        "0: 0F0 1F0 1SEND_F0 1RECV_B0 1B0 0B0",
        "1: 2RECV_F0 2F0 2B0 2SEND_B0",
    ]


def test_unequal_replicas_send_to_several_and_receive_once() -> None:
    plan = a_plan((0, 1), (1, 2, 3), microbatches=1)
    forward = "0: 0F0", "1: 0F0 1F0", "2: 1F0", "3: 1F0"
    assert exchanged(plan, *forward, batch_size=12) == [
        "0: 0F0 0SEND_F0",
        "1: 0F0 1RECV_F0 0SEND_F0 1F0",
        "2: 1RECV_F0 1F0",
        "3: 1RECV_F0 1F0",
    ]


def test_images_and_labels_are_loaded_before_the_forward_that_needs_them() -> None:
    three = a_plan((0,), (1,), (2,), microbatches=1)
    steps = from_text("0: 0F0 0B0\n1: 1F0 1B0\n2: 2F0 2B0")
    assert lines(schedule.add_loads(steps, three)) == [
        "0: 0LOAD0 0F0 0B0",
        "1: 1F0 1B0",
        "2: 2LOAD0 2F0 2B0",
    ]
    one = a_plan((0,), microbatches=1)
    assert lines(schedule.add_loads(from_text("0: 0F0 0B0"), one)) == ["0: 0LOAD0 0F0 0B0"]


def test_gradients_are_reduced_once_complete_and_sent_on_before_that() -> None:
    steps = from_text("0: 1B0 1SEND_B0 0B0 1I1 1SEND_B1 0B1 1W1")
    assert lines(schedule.add_reductions(steps)) == [
        "0: 1B0 1SEND_B0 0B0 1I1 1SEND_B1 0B1 0REDUCE 1W1 1REDUCE"
    ]
    assert lines(schedule.add_reductions(from_text("0: 1B0 1SEND_B0"))) == [
        "0: 1B0 1SEND_B0 1REDUCE"
    ]


def test_a_rank_updates_its_stages_after_all_else() -> None:
    assert lines(schedule.add_updates(from_text("0: 2F0 0F0\n1: 1F0"))) == [
        "0: 2F0 0F0 0STEP 2STEP",
        "1: 1F0 1STEP",
    ]


def test_halves_without_a_break_become_a_whole_backward() -> None:
    plan = a_plan((0,), (0,), microbatches=2)
    steps = from_text("0: 0F0 1F0 1I0 1W0 0B0 0F1 1F1 1I1 0B1 1W1")
    assert lines(schedule.merge_halves(steps, plan)) == ["0: 0F0 1F0 1B0 0B0 0F1 1F1 1I1 0B1 1W1"]


def test_halves_stay_apart_where_another_rank_waits_for_the_first() -> None:
    steps = from_text("0: 0F0 0B0\n1: 1F0 1I0 1W0")
    plan = a_plan((0,), (1,), microbatches=1)
    assert schedule.merge_halves(steps, plan) == steps


def test_replicas_merge_the_same_halves_or_none() -> None:
    plan = a_plan((0,), (0, 1), (1,), microbatches=2)
    apart = from_text(
        "0: 0F0 0F1 1F0 1F1 1I0 1W0 1I1 1W1 0B0 0B1\n1: 1F0 2F0 1F1 2F1 2B0 1I0 2B1 1W0 1I1 1W1"
    )
    merged = lines(schedule.merge_halves(apart, plan))
    assert merged == [
        "0: 0F0 0F1 1F0 1F1 1I0 1W0 1B1 0B0 0B1",
        "1: 1F0 2F0 1F1 2F1 2B0 1I0 2B1 1W0 1B1",
    ]


def test_a_circular_order_is_refused_with_where_each_rank_stands() -> None:
    text = "0: 0B0 0F0\n1: 1F0 1B0"
    with pytest.raises(ScheduleError, match="schedule hangs: rank 0 at 0B0, rank 1 at 1F0"):
        schedule.completions(from_text(text), TWO)


def computing(steps: Schedule) -> Schedule:
    return {rank: [a for a in actions if a.kind in "FBIW"] for rank, actions in steps.items()}


def before_merging(plan: Plan, made: Cut) -> Schedule:
    return schedule.compute_order(plan, made.microbatches)


@settings(max_examples=100, deadline=None)
@given(cases)
def test_merging_never_delays_anything(case: Case) -> None:
    plan, batch_size = case
    order = before_merging(plan, cut(plan, batch_size))
    apart = schedule.completions(order, plan)
    merged = schedule.completions(schedule.merge_halves(order, plan), plan)
    for action, end in merged.items():
        whole = action._replace(kind="W") if action.kind == "B" else action
        assert end == apart.get(action, apart.get(whole))


@settings(max_examples=50, deadline=None)
@given(cases)
def test_passes_leave_the_order_of_computing_as_it_is(case: Case) -> None:
    plan, batch_size = case
    made = cut(plan, batch_size)
    merged = schedule.merge_halves(before_merging(plan, made), plan)
    assert computing(schedule.training_step(plan, made)) == merged
