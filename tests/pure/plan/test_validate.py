"""Every generated schedule is valid for any plan, and every injected fault is reported."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.plan import schedule
from hvdtrain.plan.cut import Cut, Schedule, ScheduleError, cut
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.validate import grid, validate
from tests.pure.parallel.plans import Case, a_pipeline, a_plan, cases
from tests.pure.plan.forms import from_text, to_text

TWO = a_pipeline("1f1b", 2, 2)
STEP = """\
0: 0LOAD0 0F0 0SEND_F0 0LOAD1 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE 0STEP
1: 1RECV_F0 1LOAD0 1F0 1RECV_F1 1B0 1SEND_B0 1LOAD1 1F1 1B1 1SEND_B1 1REDUCE 1STEP
"""


def made_for(case: Case) -> tuple[Schedule, Plan, Cut]:
    plan, batch_size = case
    made = cut(plan, batch_size)
    return schedule.training_step(plan, made), plan, made


def message_of(text: str, plan: Plan = TWO, tag_limit: int = 32767) -> str:
    with pytest.raises(ScheduleError) as caught:
        validate(from_text(text), plan, cut(plan, 4), tag_limit=tag_limit)
    return str(caught.value)


def test_the_step_that_is_mutated_below_is_valid() -> None:
    assert to_text(schedule.training_step(TWO, cut(TWO, 4))) == STEP
    validate(from_text(STEP), TWO, cut(TWO, 4))


@pytest.mark.parametrize(
    ("present", "mutated", "message"),
    [
        ("0SEND_F1 ", "", "rank 0 lacks 0SEND_F1"),
        ("1SEND_B1 ", "", "rank 1 lacks 1SEND_B1"),
        ("1RECV_F0 ", "", "rank 1 lacks 1RECV_F0"),
        ("0RECV_B1 ", "", "rank 0 lacks 0RECV_B1"),
        ("0LOAD1 ", "", "rank 0 lacks 0LOAD1"),
        (" 0STEP", "", "rank 0 lacks 0STEP"),
        (" 1REDUCE", "", "rank 1 lacks 1REDUCE"),
        ("1F1 ", "", "rank 1 lacks 1F1"),
        ("1B1 ", "", "rank 1 lacks 1B1"),
        ("1B1 ", "1I1 ", "rank 1 lacks 1W1"),
        ("1B1 ", "1B1 1W1 ", "rank 1 does 1W1 in addition to 1B1"),
        ("1B1 ", "1I1 1B1 ", "rank 1 does 1B1 in addition to 1I1"),
        ("0B1", "0I1 0W1", "rank 0 does 0I1, but stage 0 runs whole backwards"),
        ("0F1", "0F0", "rank 0 does 0F0 twice"),
        ("0B1", "0B0", "rank 0 does 0B0 twice"),
        ("1B1", "1B2", "rank 1 does 1B2, but the micro-batches are 0 to 1"),
        ("0B1", "1B1", "rank 0 does 1B1, but does not hold stage 1"),
        ("1F0", "1SEND_F0 1F0", "rank 1 does 1SEND_F0, but there is nothing to send"),
        ("0B0", "0SEND_B0 0B0", "rank 0 does 0SEND_B0, but there is nothing to send"),
        ("1F1 1B1", "1B1 1F1", "rank 1 does 1B1 before 1F1"),
        ("0LOAD1 0F1", "0F1 0LOAD1", "rank 0 does 0F1 before 0LOAD1"),
        ("0RECV_B1 0B1", "0B1 0RECV_B1", "rank 0 does 0B1 before 0RECV_B1"),
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "rank 0 does 0SEND_F0 before 0F0"),
        ("1B1 1SEND_B1", "1SEND_B1 1B1", "rank 1 does 1SEND_B1 before 1B1"),
        ("1SEND_B1 1REDUCE 1STEP", "1REDUCE 1STEP 1SEND_B1", "does 1STEP before 1SEND_B1"),
        ("0B1 0REDUCE", "0REDUCE 0B1", "rank 0 does 0REDUCE before 0B1"),
        ("0REDUCE 0STEP", "0STEP 0REDUCE", "rank 0 does 0STEP before 0REDUCE"),
        ("0SEND_F1", "0SEND_F0", "0SEND_F0 uses the tag 0 of 0SEND_F0 with rank 1 again"),
        ("1RECV_F1", "1RECV_F0", "1RECV_F0 uses the tag 0 of 1RECV_F0 with rank 0 again"),
        ("1: ", "2: ", "the schedule is for ranks [0, 2], the plan for [0, 1]: rank 1 is in one"),
    ],
)
def test_a_fault_is_named_in_the_first_line(present: str, mutated: str, message: str) -> None:
    assert STEP.count(present) == 1
    assert message in message_of(STEP.replace(present, mutated)).splitlines()[0]


def test_the_weight_half_follows_the_input_half() -> None:
    assert "rank 1 does 1W1 before 1I1" in message_of(STEP.replace("1B1", "1W1 1I1"))


def test_waiting_in_a_circle_is_found_even_if_only_blocking_sends_wait() -> None:
    late = STEP.replace("1F0 1RECV_F1 1B0 1SEND_B0", "1F0 1B0 1SEND_B0 1RECV_F1")
    lines = message_of(late).splitlines()
    assert lines[0] == (
        "deadlock: rank 0 at 0SEND_F1 waits for 1RECV_F1 on rank 1; "
        "rank 1 at 1SEND_B0 waits for 0RECV_B0 on rank 0, under rendezvous sends"
    )
    assert [line.split()[:7] for line in lines[1:]] == [
        ["step", "1", "2", "3", "4", "5", "6"],
        ["rank", "0", "0F0", "0SEND_F0", "0LOAD1", "0F1", "->"],
        ["rank", "1", "1LOAD0", "1F0", "1B0", "1SEND_B0", "1RECV_F1"],
    ]


def test_waiting_in_a_circle_is_found_under_eager_sends() -> None:
    crossed = STEP.replace("0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1", "0RECV_B0 0RECV_B1")
    crossed = crossed.replace("0B1 0REDUCE", "0B1 0B0 0F1 0SEND_F1 0REDUCE")
    assert "rank 0 does 0B1 before 0F1" in message_of(crossed)
    waits = STEP.replace("1B0 1SEND_B0 1LOAD1 1F1", "1LOAD1 1F1 1B0 1SEND_B0").replace(
        "0F1 0SEND_F1 0RECV_B0 0B0", "0RECV_B0 0B0 0F1 0SEND_F1"
    )
    first = message_of(waits).splitlines()[0]
    assert first.endswith("under eager sends")
    assert "rank 0 at 0B0 waits for 1SEND_B0 on rank 1" in first


def test_replicas_in_different_order_lock_up_only_if_they_synchronise() -> None:
    plan = a_plan((0, 1), microbatches=2, schedule="gpipe")
    steps = from_text(
        "0: 0LOAD0 0F0 0LOAD1 0F1 0B0 0B1 0REDUCE 0STEP\n"
        "1: 0LOAD1 0F1 0LOAD0 0F0 0B0 0B1 0REDUCE 0STEP"
    )
    validate(steps, plan, cut(plan, 4))
    with pytest.raises(ScheduleError, match="under eager sends and synchronised batch norm"):
        validate(steps, plan, cut(plan, 4), synchronised={0})


def test_a_tag_above_the_librarys_limit_is_refused() -> None:
    # Tags are 0 and 1 for activations, 2 and 3 for gradients.
    validate(from_text(STEP), TWO, cut(TWO, 4), tag_limit=3)
    message = message_of(STEP, tag_limit=2)
    assert message.startswith(
        "rank 0: the tag 3 of 0RECV_B1 is above the MPI library's limit of 2"
    )


def test_an_error_shows_the_steps_about_the_place_in_a_grid() -> None:
    assert message_of(STEP.replace("1SEND_B0 ", "")).splitlines() == [
        "rank 1 lacks 1SEND_B0",
        "step    0         1       2         3         4       5         6         7    8",
        "rank 0  0LOAD0    0F0     0SEND_F0  0LOAD1    0F1     0SEND_F1  0RECV_B0  0B0  0RECV_B1",
        "rank 1  1RECV_F0  1LOAD0  1F0       1RECV_F1  -> 1B0  1LOAD1    1F1       1B1  1SEND_B1",
    ]
    last = message_of(STEP.replace(" 1STEP", "")).splitlines()[1:]
    assert [line.split()[-1] for line in last] == ["11", "0STEP", "1REDUCE"]
    assert last[2].split()[-2] == "->"


def test_a_grid_without_a_mark_is_the_whole_schedule() -> None:
    assert grid(from_text("0: 0LOAD0 0F0\n11: 1F0")).splitlines() == [
        "step     0       1",
        "rank 0   0LOAD0  0F0",
        "rank 11  1F0",
    ]
    assert grid({}) == "step"


@settings(max_examples=150, deadline=None)
@given(cases, st.booleans())
def test_every_schedule_made_is_valid(case: Case, synchronised: bool) -> None:
    steps, plan, made = made_for(case)
    together = set(range(len(plan.stages))) if synchronised and plan.schedule != "zb-h1" else set()
    validate(steps, plan, made, synchronised=together)


@settings(max_examples=150, deadline=None)
@given(cases, st.data())
def test_whatever_is_dropped_or_done_twice_is_found(case: Case, data: st.DataObject) -> None:
    steps, plan, made = made_for(case)
    rank = data.draw(st.sampled_from(plan.ranks))
    index = data.draw(st.integers(0, len(steps[rank]) - 1))
    action = steps[rank][index]
    before, after = steps[rank][:index], steps[rank][index + 1 :]
    with pytest.raises(ScheduleError, match=rf"rank {rank} .*\b{action}\b"):
        validate({**steps, rank: before + after}, plan, made)
    with pytest.raises(ScheduleError, match=rf"rank {rank}.*\b{action}\b"):
        validate({**steps, rank: [*before, action, action, *after]}, plan, made)


@settings(max_examples=150, deadline=None)
@given(cases, st.data())
def test_a_wrong_micro_batch_is_found(case: Case, data: st.DataObject) -> None:
    steps, plan, made = made_for(case)
    rank = data.draw(st.sampled_from(plan.ranks))
    numbered = [i for i, a in enumerate(steps[rank]) if a.microbatch is not None]
    index = data.draw(st.sampled_from(numbered))
    action = steps[rank][index]
    other = data.draw(st.integers(0, made.microbatches).filter(lambda k: k != action.microbatch))
    changed = [*steps[rank]]
    changed[index] = action._replace(microbatch=other)
    with pytest.raises(ScheduleError):
        validate({**steps, rank: changed}, plan, made)
