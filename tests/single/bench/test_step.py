"""The seconds of operations are those of their calls, by step and by rank."""

import time

import pytest
import torch

from hvdtrain.bench.step import mean_over_ranks, operation_seconds


def test_the_operations_of_steps_are_timed_and_their_sum_is_within_the_wall_time() -> None:
    values = torch.ones(300, 300)

    def step() -> None:
        torch.mm(values, values)
        torch.mm(values, values).relu()

    step()
    start = time.perf_counter()
    seconds = operation_seconds(step, 4, torch.device("cpu"))
    wall = time.perf_counter() - start
    assert {"mm", "relu"} <= seconds.keys()
    assert "add" not in seconds
    assert seconds["mm"] > seconds["relu"] > 0
    assert sum(seconds.values()) <= wall / 4


def test_an_operation_that_some_ranks_do_not_have_counts_as_zero_there() -> None:
    means = mean_over_ranks([{"mm": 1.0, "add": 5.0}, {"mm": 3.0}])
    assert list(means) == ["add", "mm"]
    assert means == pytest.approx({"add": 2.5, "mm": 2.0})
