"""Options of parameter servers, and what does not go together with them."""

from typing import Any

import pytest

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.options.requests import Server, parse_sync_request


def config_of(**options: Any) -> TrainConfig:
    return TrainConfig(model="cnn", data="set", **options).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compress": "bf16"}, "--compress bf16 is not supported with --sync server"),
        ({"shard_optimizer": True}, "--shard-optimizer is not supported with --sync server"),
        ({"plan": "mp"}, "--plan mp is not supported with --sync server.*: use --plan dp"),
        ({"plan": "hp:2x2"}, "--plan hp:2x2 is not supported"),
        ({"plan": "auto"}, "--plan auto is not supported"),
        ({"plan": "adaptive"}, "--plan adaptive is not supported"),
        ({"clip_norm": 1.0}, "--clip-norm 1.0 is not supported with --sync server"),
        ({"verify": True}, "--verify is not supported"),
        ({"batch_norm": "sync"}, "--batch-norm sync is not supported"),
        ({"reduce_with": "mpi"}, "--reduce-with mpi is not supported"),
        ({"allreduce": "ring"}, "--allreduce ring is not supported"),
        ({"ranks": 1}, "leaves none of 1 rank.* to train: use at least --ranks 2"),
        ({"ranks": 3, "sync": "server,servers=3"}, "use at least --ranks 4"),
        ({"ranks": 4, "restarts": "1,min-ranks=1"}, "give at least min-ranks=2"),
    ],
)
def test_what_servers_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config_of(**({"sync": "server"} | options))


@pytest.mark.parametrize("count", ["0", "1.5", "", "two", "1e400"])
def test_there_is_a_whole_number_of_servers(count: str) -> None:
    with pytest.raises(UsageError, match="servers must be a whole number above 0"):
        config_of(sync=f"server,servers={count}")


@pytest.mark.parametrize("text", ["server:", "server:fast", "server:stale=", "server:stale=-1"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--sync {text} is not known: use server"):
        config_of(sync=text)


@pytest.mark.parametrize(
    ("text", "staleness", "ahead"),
    [("server", 0, 1), ("server:stale=0", 0, 1), ("server:stale=2", 2, 3)],
)
def test_a_staleness_bounds_how_far_ranks_may_be_ahead(
    text: str, staleness: int, ahead: int
) -> None:
    assert parse_sync_request(text) == Server(staleness)
    assert config_of(sync=text).steps_ahead == ahead


def test_without_a_bound_ranks_may_be_a_fixed_number_of_steps_ahead() -> None:
    assert parse_sync_request("server:async") == Server(None)
    assert config_of(sync="server:async").steps_ahead == 32
    with pytest.raises(UsageError, match="with S from 0 to 31"):
        config_of(sync="server:stale=32")


def test_the_last_ranks_are_servers() -> None:
    assert config_of(sync="server,servers=2").workers_of(5) == 3
    assert config_of().workers_of(5) == 5
    with pytest.raises(UsageError, match="use at least --ranks 3"):
        config_of(sync="server,servers=2").workers_of(2)
