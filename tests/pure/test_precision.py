"""The speed-up of bf16 is measured until it is stable, whatever disturbs the rounds."""

import itertools
from collections.abc import Sequence

import pytest

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.precision import FEWEST_ROUNDS, MOST_ROUNDS, comparison, speedup


def measured(seconds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the speed-up where the two take these seconds in turn, and the rounds measured."""
    now, runs = 0.0, {False: itertools.cycle(seconds), True: itertools.cycle(seconds)}
    count = 0

    def act(is_bf16: bool) -> None:
        nonlocal now, count
        now += next(runs[is_bf16])[is_bf16]
        count += 1

    return speedup(act, lambda: now), count / 2 - 2  # without the warm-up


def test_a_speed_up_is_that_of_most_rounds() -> None:
    """Every seventh action is interrupted, and takes ten times its duration."""
    assert measured([(2, 1)]) == (2.0, FEWEST_ROUNDS)
    assert measured([(2, 1)] * 6 + [(20, 1)])[0] == 2.0
    assert measured([(2, 1)] * 6 + [(2, 10)])[0] == 2.0


def test_it_is_repeated_until_it_is_stable() -> None:
    restless = [(2, 1), (1, 1), (3, 1), (1, 2)]
    assert measured([*restless, *[(2, 1)] * 20])[1] > FEWEST_ROUNDS
    assert measured(restless)[1] == MOST_ROUNDS


@pytest.mark.parametrize(
    ("matrices", "convolutions", "faster"),
    [(4.0, 1.0, "bf16"), (1.05, 1.08, ""), (2.0, 0.5, ""), (0.51, 1 / 1.75, "fp32")],
)
def test_bf16_is_faster_where_it_is_on_the_whole(
    matrices: float, convolutions: float, faster: str
) -> None:
    speedups = {"matrices": matrices, "convolutions": convolutions}
    named, words = comparison({"is_gpu": False, "threads": 1, "speedups": speedups})
    assert named == faster
    assert words.endswith(
        f"on 1 thread (bf16: matrices {matrices:.2f}x, convolutions {convolutions:.2f}x)"
    )


def test_auto_needs_pytorch() -> None:
    config = TrainConfig(model="cnn", data="", precision="auto", framework="tensorflow")
    with pytest.raises(UsageError, match="--precision auto is not supported with --framework te"):
        config.check()
