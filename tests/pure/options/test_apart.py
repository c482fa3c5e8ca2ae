"""Options of replicas that train apart, and what does not go together with them."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from hvdtrain import configfile
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.options.names import folded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync": "local:8", "batch_norm": "sync"}, "use --batch-norm local"),
        ({"sync": "elastic:4,rate=1.5"}, "rate must be above 0 and at most 1, not '1.5'"),
        (
            {"sync": "local:4,lr=0.5"},
            "'lr=0.5' is none of what it takes after a comma, average-op",
        ),
        (
            {"sync": "local:4", "clip_norm": 1.0},
            "local:4, which does not sum the gradients of all repl",
        ),
    ],
)
def test_what_replicas_that_train_apart_cannot_do_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(model="cnn", data="set", **options).check()


def test_the_older_name_of_local_steps_is_the_same_configuration() -> None:
    older, newer = (
        TrainConfig(model="cnn", data="d", sync=sync) for sync in ("post-local:8@2", "local:8@2")
    )
    assert older.sync_request == newer.sync_request
    assert configfile.differences(asdict(older), newer) == []
    assert configfile.differences(asdict(newer), older) == []
    assert configfile.differences(asdict(replace(newer, sync="local:4@2")), older) != []


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"sync": "diloco:8", "outer_lr": 0.5}, {"sync": "diloco:8,lr=0.5"}),
        ({"sync": "elastic:8", "elastic_rate": 0.25}, {"sync": "elastic:8,rate=0.25"}),
        ({"sync": "local:8", "average_optimizer": True}, {"sync": "local:8,average-optimizer"}),
        ({"sync": "server", "servers": 2}, {"sync": "server,servers=2"}),
        ({"compress": "topk:0.1", "compress_after": 0}, {"compress": "topk:0.1,after=0"}),
        ({"compress": "bf16", "compress_after": 100}, {"compress": "bf16"}),
        ({"loss": "cross-entropy", "label_smoothing": 0.1}, {"loss": "cross-entropy:0.1"}),
        ({"restarts": 2, "min_ranks": 3}, {"restarts": "2,min-ranks=3"}),
        ({"on_bad_step": "skip", "gradient_limit": 2.5}, {"on_bad_step": "skip:2.5"}),
        ({"emulate": "8-v100", "emulate_dilation": 20.0}, {"emulate": "8-v100:20.0"}),
        ({"plan": "auto", "memory_limit": 12.5}, {"plan": "auto:12.5GiB"}),
        ({"label_smoothing": 0.1}, {"loss": "cross-entropy:0.1"}),
        ({"precision": "fp32", "tf32": True}, {"precision": "tf32"}),
        ({"restarts": 0, "min_ranks": 3}, {"restarts": "0,min-ranks=3"}),  # of restarted ranks
        ({"gradient_limit": 10}, {"on_bad_step": "stop:10"}),
    ],
)
def test_what_was_an_option_of_its_own_is_part_of_the_method(
    older: dict[str, Any], newer: dict[str, Any]
) -> None:
    assert folded(older) == newer
    TrainConfig(model="cnn", data="set", **newer).check()


@pytest.mark.parametrize(
    "values",
    [
        {"outer_lr": 0.5},
        {"outer_lr": 0.5, "sync": ["exact", "diloco:8"]},
        {"plan": "dp", "memory_limit": 4},
        {"loss": "mine:f", "label_smoothing": 0.1},
        {"precision": "bf16", "tf32": True},
    ],
)
def test_an_option_whose_method_is_not_known_is_not_dropped(values: dict[str, Any]) -> None:
    assert folded(values) == values  # and then refused as an unknown key


def test_methods_are_compared_by_what_they_mean() -> None:
    short, long = (
        TrainConfig(model="cnn", data="d", sync=sync) for sync in ("diloco:8", "diloco:8,lr=0.7")
    )
    assert configfile.differences(asdict(short), long) == []
    assert configfile.differences(asdict(short), replace(long, sync="diloco:8,lr=0.6")) != []
    one, two = (replace(short, sync=f"server,servers={count}") for count in (1, 2))
    assert configfile.differences(asdict(one), two) == []  # a run may resume so
