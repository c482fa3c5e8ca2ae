"""The texts of `--on-bad-step` and `--restarts`, and `--emulate` with a speed."""

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain import configfile
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.options.names import folded
from hvdtrain.options.requests import (
    FAULTS,
    NO_COMPRESSION,
    BadStep,
    Chosen,
    CompressRequest,
    Fault,
    PowerSGD,
    Restarts,
    Rounded,
    Server,
    TopK,
    minutes,
    parse_bad_step,
    parse_compress_request,
    parse_faults,
    parse_plan_request,
    parse_restarts,
    parse_sync_request,
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
    assert parse_restarts("3,min-ranks=2,grow-after=9.5") == Restarts(3, 2, 9.5)


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


@pytest.mark.proves("`--inject` injects each fault of its table, and refuses what cannot happen.")
def test_faults_are_read_one_by_one() -> None:
    assert parse_faults("kill step=20 rank=1; slow step=5 seconds=0.25 steps=3", ranks=2) == (
        Fault("kill", 20, 1),
        Fault("slow", 5, 0, steps=3, seconds=0.25),
    )
    assert parse_faults("nan step=7 component=layer1.0", 1) == (
        Fault("nan", 7, None, component="layer1.0"),
    )
    assert parse_faults("nan step=7", 1) == (Fault("nan", 7, 0),)


def test_a_seed_decides_the_step_and_the_rank() -> None:
    drawn = {parse_faults(f"kill step=10..50 rank=any seed={seed}", 4)[0] for seed in range(50)}
    assert {fault.rank for fault in drawn} == {0, 1, 2, 3}
    assert len({fault.step for fault in drawn}) > 15
    assert all(10 <= fault.step <= 50 for fault in drawn)
    again = parse_faults("kill step=10..50 rank=any seed=7", 4)
    assert again == parse_faults("kill step=10..50 rank=any seed=7", 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "KIND is kill, segfault"),
        ("die step=3", "KIND is kill, segfault"),
        ("kill", "needs step=N"),
        ("kill rank=1", "needs step=N"),
        ("kill step=3 seconds=1", "kill takes step, rank or seed"),
        ("kill step=0", "'0' is not a whole number of at least 1"),
        ("kill step=-1", "'-1' is not a whole number of at least 1"),
        ("kill step=1e9", "'1e9' is not a whole number"),
        ("kill step=3 rank=2", "rank 2 does not exist, use 0 to 1"),
        ("kill step=3 rank", "is not understood"),
        ("slow step=3 seconds=inf", "'inf' is not a duration in seconds"),
        ("replan step=3 rank=1", "all ranks change the plan: leave out rank="),
        ("kill step=3;", "KIND is kill, segfault"),
    ],
)
def test_anything_else_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_faults(text, ranks=2)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


WORDS = st.sampled_from(
    [*FAULTS, "step", "rank", "seed", "=", "..", "any", "1", "-1", "9" * 30, ";", " ", "\0", "x"]
)


@given(st.lists(WORDS, max_size=12).map("".join) | st.text(max_size=40), st.integers(1, 8))
def test_a_text_is_faults_of_these_ranks_or_an_error_of_ours(text: str, ranks: int) -> None:
    try:
        faults = parse_faults(text, ranks)
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert all(fault.kind in FAULTS and 0 <= (fault.rank or 0) < ranks for fault in faults)
        assert all(fault.step > 0 for fault in faults)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("30", 30), ("90", 90), ("0", 0)),
        *(("30:00", 30), ("1:30", 2), ("90:00", 90), ("0:01", 1)),
        *(("1:00:00", 60), ("1:30:00", 90), ("0:00:01", 1), ("24:00:00", 1440), ("1:2:3", 63)),
        *(("1-12", 2160), ("0-1", 60)),
        *(("1-12:30", 2190), ("1-0:05", 1445)),
        *(("1-12:30:00", 2190), ("2-01:00:30", 2941), ("1-00:00:00", 1440)),
    ],
)
def test_a_limit_is_read_as_slurm_reads_it(text: str, expected: int) -> None:
    assert minutes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "soon", "-5", "infinite", "n/a", "1h", "1.5", " 30", "30 "),
        *("1:2:3:4", "1-2:3:4:5", "1-", "-", ":30", "1:", "1--2", "1-2-3", "1:-2"),
        *("1:75:00", "0:75:00", "1:00:60", "1:60", "1-0:60", "1-0:00:60", "1:100", "1:00:100"),
        *("\u0663", "9" * 5000),
    ],
)
def test_any_other_text_is_no_limit(text: str) -> None:
    assert minutes(text) is None


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


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("none", NO_COMPRESSION),
        ("fp16", Rounded("fp16")),
        ("bf16", Rounded("bf16")),
        ("int8,after=7", Rounded("int8", 7)),
        ("topk:0.01", TopK(0.01)),
        ("topk:1", TopK(1.0)),
        ("topk:1e-3", TopK(0.001)),
        ("powersgd:4", PowerSGD(4)),
    ],
)
def test_what_a_text_requests(text: str, request_: CompressRequest) -> None:
    assert parse_compress_request(text) == request_


@pytest.mark.parametrize(
    "text",
    ["", "fp8", "topk", "topk:0", "topk:1.5", "topk:-0.1", "topk:nan", "powersgd:0"]
    + ["powersgd:1.5", "powersgd:1e2", "powersgd:-1", "FP16", "topk:0.1 "],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"is not known: use none, fp16, bf16, int8, topk:RATIO or pow"
    ):
        parse_compress_request(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"compress": "none,after=5"}, "'after=5' is none of what it takes after a comma"),
        ({"compress": "topk:0.1,after=-1"}, "after must be a whole number, not '-1'"),
        (
            {"compress": "fp16", "sync": "local:4"},
            "local:4, which does not sum .*: use --sync exact, or leave --comp",
        ),
        (
            {"compress": "fp16", "sync": "elastic:4"},
            "not supported with --sync elastic:4, which does",
        ),
        (
            {"compress": "fp16", "shard_optimizer": True},
            "--compress fp16, which has no exact sums: leave one",
        ),
        ({"compress": "fp16", "verify": True}, "fp16, which differs from the serial run"),
        ({"compress": "fp16", "plan": "adaptive"}, "which it cannot predict: use --plan auto"),
        ({"compress": "fp16", "framework": "tensorflow"}, "--compress is not supported with"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(model="cnn", data="d", **values).check()


def test_what_goes_together_is_accepted() -> None:
    config = TrainConfig(model="cnn", data="d", compress="topk:0.1,after=0")
    assert config.check().compress_request == TopK(0.1, 0)


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
