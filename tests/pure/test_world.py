"""The settings that Horovod is started with."""

import pytest

from hvdtrain.world import horovod_cycle

SMALL, LARGE = 2**20, 2**27


@pytest.mark.parametrize(
    ("parameter_bytes", "on_gpu", "milliseconds"),
    [(SMALL, False, 0.3), (LARGE, False, 5), (SMALL, True, 0.3), (LARGE, True, 1)],
)
def test_the_thread_wakes_less_often_where_it_takes_time_from_a_long_step(
    parameter_bytes: int, on_gpu: bool, milliseconds: float
) -> None:
    assert horovod_cycle(parameter_bytes, on_gpu) == milliseconds
