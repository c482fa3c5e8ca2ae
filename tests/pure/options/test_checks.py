"""The options that each framework supports, and those that exclude each other."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from hvdtrain.config import TrainConfig
from hvdtrain.configfile import differences
from hvdtrain.errors import UsageError
from hvdtrain.options.requests import SINGLE, Mirrored, parse_plan_request


def config(**values: Any) -> TrainConfig:
    return TrainConfig(**{"model": "cnn", "data": "d", "framework": "tensorflow", **values})


@pytest.mark.parametrize("plan", [None, "single", "dp", "mirrored", "mirrored:4"])
def test_keras_is_data_parallel(plan: str | None) -> None:
    assert config(plan=plan).check().plan == plan


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"plan": "mp"}, "--plan mp is not supported with --framework tensorflow: use sin"),
        ({"plan": "plan.json"}, "--plan plan.json is not supported"),
        ({"plan": "mirrored:0"}, "mirrored:0 is not known: write mirrored:N for N devices"),
        ({"plan": "mirrored:x"}, "--plan mirrored:x is not known"),
        ({"plan": "mirrored:65"}, "has more devices than --batch-size 64 has images"),
        ({"plan": "mirrored", "ranks": 2}, "runs in one process, not on 2 ranks"),
        ({"plan": "mirrored", "clip_norm": 1.0}, "--clip-norm is not supported with --plan mir"),
        ({"plan": "mirrored", "on_bad_step": "skip"}, "--on-bad-step is not supported with"),
        ({"plan": "mirrored", "framework": "torch"}, "add --framework tensorflow"),
        ({"schedule": "1f1b"}, "--schedule is not supported with --framework tensorflow"),
        ({"compile": True}, "--compile is not supported with"),
        ({"batch_norm": "sync"}, "--batch-norm is not supported with"),
        ({"weights": "w.pth"}, "--weights is not supported with"),
        ({"trace": "t.json"}, "--trace is not supported with"),
    ],
)
def test_what_a_framework_does_not_do_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        config(**values).check()


def test_mirrors_are_counted() -> None:
    plans = ("single", "mirrored", "mirrored:3")
    assert [parse_plan_request(plan) for plan in plans] == [SINGLE, Mirrored(None), Mirrored(3)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"expected": 94.0}, "--expected must be between 0 and 1"),
    ],
)
def test_ingredients_that_exclude_each_other_or_do_nothing_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(model="cnn", data="d", **values).check()


def test_a_run_of_an_older_version_had_the_defaults_of_newer_options() -> None:
    new = TrainConfig(model="cnn", data="d", clip_norm=2.0, expected=0.9)
    old = asdict(new)
    del old["clip_norm"], old["expected"]
    assert differences(old, new) == ["clip_norm was None, is 2.0"]
    assert differences(old, replace(new, clip_norm=None)) == []


def test_a_run_with_an_option_that_went_is_not_continued_without_it() -> None:
    new = TrainConfig(model="cnn", data="d")
    assert differences(asdict(new) | {"whiten": False, "shift": 4, "lookahead": None}, new) == []
    assert differences(asdict(new) | {"whiten": True}, new) == [
        "whiten was True, which this version cannot continue"
    ]


def test_what_the_first_versions_did_has_to_be_asked_for() -> None:
    """All parameters decayed, and the mean included held-out images."""
    new = TrainConfig(model="cnn", data="d", weight_decay=0.1, holdout=0.2)
    old = asdict(new)
    assert differences(old, new) == []
    del old["loss"]
    assert differences(old, new) == [
        "no_decay was 'none', which this version cannot continue",
        "normalise was 'split', is 'meanstd'",
    ]
    old |= {"weight_decay": 0.0}
    assert differences(old, replace(new, weight_decay=0.0, normalise="split")) == []
    old |= {"weight_decay": 0.1, "no_decay": "bias, norm,position"}
    assert differences(old, new) == []
