"""Options of replicas that train apart, and what does not go together with them."""

from typing import Any

import pytest

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
