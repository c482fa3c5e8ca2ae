import pytest

from hvdtrain.plan import schedule
from hvdtrain.plan.cut import Action, cut
from hvdtrain.plan.plan import Plan, Stage
from hvdtrain.plan.schedule import Lane, Program, program


def uneven() -> Plan:
    """Return stage 0 on ranks 0 and 1 and stage 1 on rank 1: half of its input is local."""
    return Plan((Stage(("a",), (0, 1), (1, 1)), Stage(("b",), (1,), (1,))), microbatches=2)


def program_of(rank: int, batch_size: int = 8) -> Program:
    pieces = cut(uneven(), batch_size)
    actions = schedule.training_step(uneven(), pieces)[rank]
    return program(uneven(), pieces, actions, rank)


def test_a_task_knows_where_its_rows_come_from() -> None:
    tasks = {str(task.action): task for task in program_of(1).tasks}
    assert tasks["1F0"].rows == 4
    assert tasks["1F0"].lanes == (Lane(0, (0, 2), (0, 2)), Lane(1, (2, 4), (0, 2)))
    assert tasks["1RECV_F0"].lanes == (Lane(0, (0, 2), (0, 2)),), "only what comes from others"
    assert tasks["0B1"].lanes == (Lane(1, (0, 2), (2, 4)),)
    assert tasks["1SEND_B0"].lanes == (Lane(0, (0, 2), (0, 2)),)


def test_both_sides_of_a_message_have_one_tag_and_different_messages_different_ones() -> None:
    sides = [{str(task.action): task.tag for task in program_of(rank).tasks} for rank in (0, 1)]
    for k in range(2):
        assert sides[0][f"0SEND_F{k}"] == sides[1][f"1RECV_F{k}"]
        assert sides[1][f"1SEND_B{k}"] == sides[0][f"0RECV_B{k}"]
    tags = [sides[0][f"0{kind}{k}"] for kind in ("SEND_F", "RECV_B") for k in range(2)]
    assert len(set(tags)) == 4


def test_tensors_are_kept_for_each_of_their_uses() -> None:
    prepared = program_of(1)
    assert prepared.output_uses[0, 0] == 2, "the forward of stage 1, and the backward"
    assert prepared.output_uses[1, 0] == 1, "the backward of the loss"
    assert prepared.gradient_uses[1, 0] == 2, "sent to rank 0, and the backward of stage 0"
    assert program_of(0).output_uses[0, 1] == 2, "sent to rank 1, and the backward"


def test_the_last_backward_of_each_stage_completes_its_gradients() -> None:
    assert program_of(1).completing == {Action(0, "B", 1), Action(1, "B", 1)}


def test_lines_name_stage_microbatch_and_peers() -> None:
    lines = [task.line for task in program_of(0).tasks]
    assert "0B1: backward (stage 0, micro-batch 1, with rank 1)" in lines
    assert "0STEP: waiting for the reduction, and updating (stage 0, with rank 1)" in lines


@pytest.mark.parametrize("rank", [0, 1])
def test_images_and_labels_lie_where_the_rank_has_read_them(rank: int) -> None:
    prepared = program_of(rank, batch_size=9)
    assert prepared.images == (((0, 3), (3, 5)) if rank == 0 else ((0, 2), (2, 4)))
    assert prepared.labels == (() if rank == 0 else ((0, 5), (5, 9)))
    assert sum(share.weight for share in prepared.shares.values()) == pytest.approx(
        5 / 9 if rank == 0 else 4 / 9 + 1
    )
