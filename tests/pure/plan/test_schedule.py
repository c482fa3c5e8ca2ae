"""Compute orders equal those of the publications and keep their memory limits for any plan."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings

from hvdtrain.plan import schedule
from hvdtrain.plan.cut import Action, cut, last_backward, peers, tag
from hvdtrain.plan.plan import SCHEDULES, Plan
from hvdtrain.plan.simulate import simulate, unit_costs
from hvdtrain.plan.trace import draw
from tests.pure.parallel.plans import Case, a_pipeline, a_plan, cases, plans
from tests.pure.plan.forms import from_text, to_text

GOLDEN = Path(__file__).parent / "golden"
# To regenerate: .venv/bin/python -m tests.pure.plan.test_schedule

PICTURES = {
    "gpipe": [
        "0 01234567.........aabbccddeeffgghh",
        "1 .01234567......aabbccddeeffgghh..",
        "2 ..01234567...aabbccddeeffgghh....",
        "3 ...01234567aabbccddeeffgghh......",
    ],
    "1f1b": [
        "0 0123......aa4bb5cc6dd7ee.ff.gg.hh",
        "1 .012....aa3bb4cc5dd6ee7ff.gg.hh..",
        "2 ..01..aa2bb3cc4dd5ee6ff7gg.hh....",
        "3 ...0aa1bb2cc3dd4ee5ff6gg7hh......",
    ],
    "interleaved": [
        "0 01230123456...aa7bb.4cc5dd6aa7bbcc.dd.ee.ff.gg.hheeffgghh",
        "1 .012301234..aa5bb6cc7dd4aa5bb6cc7dd.ee.ff.gg.hheeffgghh..",
        "2 ..0123012.aa3bb4cc5dd6aa7bb4cc5dd6ee7ff.gg.hheeffgghh....",
        "3 ...01230aa1bb2cc3dd4aa5bb6cc7dd4ee5ff6gg7hheeffgghh......",
    ],
    "zb-h1": [
        "0 0123...aa4bb5cc6dd7eeffgghh",
        "1 .012..a3bA4cB5dC6eD7fEgFhGH",
        "2 ..01.a2b3cA4dB5eC6fD7gEhFGH",
        "3 ...0a1b2c3dA4eB5fC6gD7hEFGH",
    ],
}


def picture(plan: Plan, batch_size: int) -> list[str]:
    """Return one line per rank with one sign per unit of time."""
    made = cut(plan, batch_size)
    line = simulate(schedule.training_step(plan, made), plan, made, unit_costs())
    return draw(line.events, line.ranks, width=round(line.seconds)).splitlines()[:-1]


def golden_text(name: str, ranks: int) -> str:
    plan = a_pipeline(name, ranks, 2 * ranks)
    lines = to_text(schedule.training_step(plan, cut(plan, 2 * ranks)))
    return "\n".join([*picture(plan, 2 * ranks), "", lines])


def words(actions: list[Action]) -> str:
    return " ".join(map(str, actions))


@pytest.mark.parametrize("name", SCHEDULES)
def test_four_ranks_and_eight_micro_batches_look_as_published(name: str) -> None:
    assert picture(a_pipeline(name, 4, 8), 8) == PICTURES[name]


@pytest.mark.parametrize(("name", "ranks"), [*product(SCHEDULES, (2, 3, 4))])
def test_whole_steps_equal_their_golden_files(name: str, ranks: int) -> None:
    assert golden_text(name, ranks) == (GOLDEN / f"{name}-{ranks}.txt").read_text()


def megatron(ranks: int, chunks: int, microbatches: int, rank: int) -> list[Action]:
    """Return the order of interleaved 1F1B as in Megatron-LM's schedules.py."""
    total = microbatches * chunks

    def nth(kind: str, n: int) -> Action:
        chunk = n // ranks % chunks
        chunk = chunk if kind == "F" else chunks - chunk - 1
        k = n // (ranks * chunks) * ranks + n % ranks
        return Action(chunk * ranks + rank, kind, k)

    ahead = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
    order = [nth("F", n) for n in range(ahead)]
    for n in range(total - ahead):
        order += [nth("F", ahead + n), nth("B", n)]
    return order + [nth("B", n) for n in range(total - ahead, total)]


@pytest.mark.parametrize(("ranks", "chunks", "groups"), [*product((2, 3, 4), (2, 3), (1, 2, 3))])
def test_interleaved_is_megatrons_order(ranks: int, chunks: int, groups: int) -> None:
    plan = a_pipeline("interleaved", ranks, ranks * groups, chunks)
    order = schedule.compute_order(plan, ranks * groups)
    for rank in range(ranks):
        assert words(order[rank]) == words(megatron(ranks, chunks, ranks * groups, rank))


@pytest.mark.parametrize(("ranks", "microbatches"), [*product((2, 3, 5), (1, 2, 4, 7))])
def test_1f1b_warms_up_then_alternates_then_drains(ranks: int, microbatches: int) -> None:
    order = schedule.compute_order(a_pipeline("1f1b", ranks, microbatches), microbatches)
    for rank in range(ranks):
        ahead = min(microbatches, ranks - rank)
        kinds = "F" * ahead + "BF" * (microbatches - ahead) + "B" * ahead
        assert "".join(action.kind for action in order[rank]) == kinds


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1"])
def test_one_stage_frees_each_micro_batch_before_the_next_is_loaded(name: str) -> None:
    plan = a_plan((0, 1), microbatches=2, schedule=name)
    step = schedule.training_step(plan, cut(plan, 4))
    assert words(step[0]) == "0LOAD0 0F0 0B0 0LOAD1 0F1 0B1 0REDUCE 0STEP"
    assert step[1] == step[0]


def test_gpipe_does_all_forwards_of_a_rank_before_its_backwards() -> None:
    one = schedule.compute_order(a_plan((0,), microbatches=2, schedule="gpipe"), 2)
    assert words(one[0]) == "0F0 0F1 0B0 0B1"
    two = schedule.compute_order(a_plan((0,), (0,), microbatches=2, schedule="gpipe"), 2)
    assert words(two[0]) == "0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1"


def test_a_rank_with_all_stages_takes_each_micro_batch_through_them() -> None:
    plan = a_plan((0,), (0,), microbatches=2)
    assert words(schedule.compute_order(plan, 2)[0]) == "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"


def test_a_backward_is_split_only_where_another_rank_can_wait_for_it() -> None:
    plan = a_plan((0,), (0,), (1,), microbatches=3, schedule="zb-h1")
    order = schedule.compute_order(plan, 3)
    assert {action.kind for action in order[0]} == {"F", "B"}
    assert {action.kind for action in order[1]} == {"F", "I", "W"}


def test_interleaved_is_1f1b_where_the_stages_do_not_go_round() -> None:
    for ranks in [((0,), (1,), (1,)), ((0,), (1,), (0,)), ((0,), (0,)), ((0, 1), (1, 2))]:
        plan = a_plan(*ranks, microbatches=8, schedule="interleaved")
        one_f_one_b = replace(plan, schedule="1f1b")
        assert schedule.compute_order(plan, 8) == schedule.compute_order(one_f_one_b, 8)


@settings(max_examples=100, deadline=None)
@given(plans(max_m=12))
def test_each_schedule_keeps_its_limit_on_micro_batches_in_flight(plan: Plan) -> None:
    stages, m = len(plan.stages), plan.microbatches
    limit = {"1f1b": lambda s: stages - s, "zb-h1": lambda s: stages}.get(
        plan.schedule, lambda s: m
    )
    made = cut(plan, 16 * m)
    line = simulate(schedule.training_step(plan, made), plan, made, unit_costs())
    for (_, stage), peak in line.peak_in_flight.items():
        assert peak <= min(made.microbatches, limit(stage))
        assert plan.schedule != "gpipe" or peak == made.microbatches


@pytest.mark.parametrize(
    ("name", "stages", "microbatches"), [*product(SCHEDULES, (1, 2, 3, 5), (1, 2, 4, 7))]
)
def test_what_a_stage_holds_is_what_the_simulator_counts(
    name: str, stages: int, microbatches: int
) -> None:
    ranks = [(rank,) for rank in range(stages)]
    plan = a_plan(*ranks, microbatches=microbatches, schedule=name)
    made = cut(plan, microbatches)
    line = simulate(schedule.training_step(plan, made), plan, made, unit_costs())
    for stage in range(stages):
        most = schedule.most_in_flight(name, stages, stage, microbatches)
        assert line.peak_in_flight[stage, stage] == most


@settings(max_examples=100, deadline=None)
@given(plans(max_m=12))
def test_replicas_do_the_actions_of_their_stages_in_the_same_order(plan: Plan) -> None:
    order = schedule.compute_order(plan, plan.microbatches)
    for first, second in product(plan.ranks, repeat=2):
        shared = set(order[first]) & set(order[second])
        assert [a for a in order[first] if a in shared] == [
            a for a in order[second] if a in shared
        ]


@settings(max_examples=100, deadline=None)
@given(cases)
def test_evaluation_is_forward_only_and_complete(case: Case) -> None:
    plan, batch_size = case
    made = cut(plan, batch_size)
    steps = schedule.evaluation(plan, made)
    simulate(steps, plan, made, unit_costs(), rendezvous=True)
    for rank, actions in steps.items():
        assert {action.kind for action in actions} <= {"LOAD", "F", "SEND_F", "RECV_F"}
        forwards = [action for action in actions if action.kind == "F"]
        assert sorted(forwards) == [
            Action(stage, "F", k)
            for stage in plan.stages_of(rank)
            for k in range(made.microbatches)
        ]


def test_evaluation_of_one_stage_loads_and_goes_forward() -> None:
    plan = a_plan((0,), microbatches=2)
    assert words(schedule.evaluation(plan, cut(plan, 2))[0]) == "0LOAD0 0F0 0LOAD1 0F1"


def test_gradients_are_complete_after_the_last_backward_or_weight_half() -> None:
    actions = from_text("0: 0F0 1F0 1I0 0B0 1W0 1SEND_B0")[0]
    assert last_backward(actions, 0) == Action(0, "B", 0)
    assert last_backward(actions, 1) == Action(1, "W", 0)
    assert last_backward(actions, 2) is None


def test_peers_are_the_other_ranks_that_hold_the_same_samples() -> None:
    plan = a_plan((0, 1), (1, 2, 3), microbatches=1)
    made = cut(plan, 12)  # rank 0 sends samples 0-5 to ranks 1 and 2; rank 1 has 6-11
    assert peers(made, 0, Action(0, "SEND_F", 0)) == (1, 2)
    assert peers(made, 1, Action(0, "RECV_B", 0)) == (2, 3)
    assert peers(made, 1, Action(1, "RECV_F", 0)) == (0,)
    assert peers(made, 2, Action(1, "SEND_B", 0)) == (0, 1)
    assert peers(made, 0, Action(0, "RECV_F", 0)) == ()
    assert peers(made, 0, Action(0, "F", 0)) == ()
    assert peers(made, 0, Action(0, "REDUCE")) == ()


@settings(max_examples=50, deadline=None)
@given(cases)
def test_both_sides_of_a_message_know_its_tag_and_no_other_message_has_it(case: Case) -> None:
    plan, batch_size = case
    made = cut(plan, batch_size)
    steps = schedule.training_step(plan, made)
    messages: dict[str, list[tuple[int, int, int]]] = {"SEND": [], "RECV": []}
    for rank, actions in steps.items():
        for action in actions:
            stage, kind, k = action
            for peer in peers(made, rank, action):
                assert k is not None
                ends = (rank, peer) if kind.startswith("SEND") else (peer, rank)
                number = tag(stage, kind, k, made.microbatches)
                messages[kind[:4]].append((*ends, number))
    assert sorted(messages["SEND"]) == sorted(messages["RECV"])
    assert len(set(messages["SEND"])) == len(messages["SEND"])


if __name__ == "__main__":
    for name, ranks in product(SCHEDULES, (2, 3, 4)):
        (GOLDEN / f"{name}-{ranks}.txt").write_text(golden_text(name, ranks))
