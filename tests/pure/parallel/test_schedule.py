import pytest

from hvdtrain.errors import UsageError
from hvdtrain.parallel import schedule
from hvdtrain.parallel.schedule import Action


def test_a_step_frees_each_micro_batch_before_the_next_is_loaded() -> None:
    assert " ".join(map(str, schedule.training_step(2))) == (
        "0LOAD0 0F0 0B0 0LOAD1 0F1 0B1 0REDUCE 0STEP"
    )


def test_evaluation_is_forward_only() -> None:
    assert " ".join(map(str, schedule.evaluation(2))) == "0LOAD0 0F0 0LOAD1 0F1"


def test_every_action_reads_back_from_its_printed_form() -> None:
    for action in [*schedule.training_step(3), Action(12, "F", 34)]:
        assert schedule.parse_action(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "0F", "0REDUCE1", "0X1", "0f1", " 0F1"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no action"):
        schedule.parse_action(text)


def test_gradients_are_complete_after_the_last_backward() -> None:
    assert schedule.last_backward(schedule.training_step(3)) == Action(0, "B", 2)
    assert schedule.last_backward(schedule.evaluation(3)) is None
