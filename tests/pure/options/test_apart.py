"""Options of replicas that train apart, and what does not go together with them."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from hvdtrain import configfile
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync": "local:8", "batch_norm": "sync"}, "use --batch-norm local"),
        ({"sync": "elastic:4", "elastic_rate": 1.5}, "--elastic-rate 1.5 goes beyond the centre"),
        ({"sync": "local:4", "outer_lr": 0.5}, "--outer-lr needs --sync diloco:H"),
        ({"sync": "local:4", "clip_norm": 1.0}, "--clip-norm needs the gradients of all replicas"),
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
