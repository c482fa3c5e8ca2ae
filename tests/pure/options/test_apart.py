"""Options of replicas that train apart, and what does not go together with them."""

from typing import Any

import pytest

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync": "local:8", "batch_norm": "sync"}, "use --batch-norm local"),
        ({"sync": "diloco:4", "fragments": 5}, "use at most --fragments 4"),
        ({"sync": "diloco:4", "overlap": 4}, "use at most --overlap 3"),
        ({"sync": "elastic:4", "elastic_rate": 1.5}, "--elastic-rate 1.5 goes beyond the centre"),
        ({"sync": "local:4", "fragments": 2}, "--fragments needs --sync diloco:H"),
        ({"sync": "local:4", "clip_norm": 1.0}, "--clip-norm needs the gradients of all replicas"),
    ],
)
def test_what_replicas_that_train_apart_cannot_do_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(model="cnn", data="set", **options).check()


def test_the_largest_fragments_and_overlap_are_accepted() -> None:
    TrainConfig(model="cnn", data="set", sync="diloco:4", fragments=4, overlap=3).check()
