"""The texts of `--on-bad-step` and `--restarts`, and `--emulate` with a speed."""

import math

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.options.requests import (
    BadStep,
    Chosen,
    Restarts,
    parse_bad_step,
    parse_plan_request,
    parse_restarts,
)
from hvdtrain.options.sections import parse_emulate


def test_a_bad_step_has_an_action_and_perhaps_a_limit() -> None:
    assert parse_bad_step("stop") == BadStep(skips=False, limit=math.inf)
    assert parse_bad_step("skip:2.5") == BadStep(skips=True, limit=2.5)


@pytest.mark.parametrize("text", ["", "go", "skip:", "skip:0", "stop:-1", "stop:nan", "stop:x"])
def test_other_actions_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="use stop or skip, or stop:NORM or skip:NORM"):
        parse_bad_step(text)


def test_restarts_are_a_number_and_perhaps_the_fewest_ranks() -> None:
    assert parse_restarts(3) == parse_restarts("3") == Restarts(3, None)
    assert parse_restarts("3,min-ranks=2") == Restarts(3, 2)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "2,min-ranks=0", "2,2", "2:2", "2,"])
def test_other_restarts_are_refused(text: str) -> None:
    words = "use N, or N,min-ranks=M|it takes after a comma, min-ranks=X|min-ranks must be a whole"
    with pytest.raises(UsageError, match=words):
        parse_restarts(text)


def test_a_cluster_may_have_a_speed() -> None:
    assert parse_emulate("8-v100") == ("8-v100", None)
    assert parse_emulate("8-v100:20") == ("8-v100", 20)
    assert parse_emulate("a:b.yaml") == ("a:b.yaml", None)
    assert parse_emulate("a:b.yaml:1e-3") == ("a:b.yaml", 0.001)
    for wrong in ("8-v100:0", "8-v100:0.0", "8-v100:1e999"):
        with pytest.raises(UsageError, match="must be above 0"):
            parse_emulate(wrong)


def test_a_chosen_plan_may_have_a_limit() -> None:
    assert parse_plan_request("auto") == Chosen(is_adaptive=False)
    assert parse_plan_request("adaptive:0.5gib") == Chosen(is_adaptive=True, memory_gib=0.5)
    for wrong in ("auto:", "auto:4", "auto:0GiB", "auto:-1GiB", "adaptive:GiB"):
        with pytest.raises(UsageError, match=r"write (auto|adaptive):XGiB"):
            parse_plan_request(wrong)
