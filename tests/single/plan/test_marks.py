"""The time of a step is that of the device, wherever its waits are."""

import pytest
import torch

from hvdtrain import device
from hvdtrain.plan.trace import Act, Reduction, StepMarks, Wait
from tests.late import late_device

CPU = torch.device("cpu")


@pytest.mark.proves(
    "The seconds of computing, communication and waiting in a step are measured on the "
    "device. Their sum is the duration of the step."
)
def test_parts_of_a_step_sum_to_its_duration() -> None:
    waits = [Wait(0.5, 1.25, 1.5, 0.25), Wait(9.0, 9.0, 9.5, 0.0)]
    reductions = [Reduction(6.0, 9.5, 11.5)]
    acts = [
        Act("F", 0.0, 4.0, waits[:1], []),  # waits for 1 s
        Act("B", 4.0, 9.0, [], []),
        Act("STEP", 9.0, 13.0, waits[1:], reductions),  # flushes for 0.5 s, waits for sums for 2 s
    ]
    marks = StepMarks(acts, waits, reductions)
    seconds = marks.seconds()
    assert dict(seconds.spent) == pytest.approx({"F": 3.0, "B": 5.0, "STEP": 1.5})
    assert (seconds.bubble, seconds.transfer) == pytest.approx((0.5, 0.25 + 0.25 + 0.5))
    assert (seconds.reduction, seconds.exposed) == pytest.approx((5.5, 2.0))
    whole = sum(seconds.spent.values()) + seconds.bubble + seconds.transfer + seconds.exposed
    assert whole == pytest.approx(13.0)


def test_a_host_that_waits_before_the_device_does_is_no_bubble() -> None:
    """The host waits for 3 s, and the device computes in the first 2.5 s."""
    marks = StepMarks(waits=[Wait(0.0, 0.5, 0.5, 1.0)])
    assert (marks.seconds().bubble, marks.seconds().transfer) == (0.0, 0.5)


def test_marks_of_a_queue_are_read_once_the_device_has_reached_them() -> None:
    with late_device() as stream:
        stream.copy(stream.host_memory((1,), torch.float32), torch.ones(1))
        first, later = device.mark(CPU), device.mark(CPU)
        read = device.read_later([torch.ones(())], CPU)
        with pytest.raises(AssertionError, match="the device has not reached a mark"):
            later - first
        read()
        assert later - first >= 0


def test_reading_nothing_waits_for_the_device_all_the_same() -> None:
    """A rank without the last stage has no loss."""
    with late_device() as stream:
        stream.copy(stream.host_memory((1,), torch.float32), torch.ones(1))
        marks = device.mark(CPU), device.mark(CPU)
        assert device.read_later([], CPU)() == []
        assert marks[1] - marks[0] >= 0
