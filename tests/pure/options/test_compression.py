"""The values of --compress, and the options that do not go together with them."""

from typing import Any

import pytest

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.options.requests import (
    NO_COMPRESSION,
    CompressRequest,
    Half,
    PowerSGD,
    TopK,
    parse_compress_request,
)


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("none", NO_COMPRESSION),
        ("fp16", Half("fp16")),
        ("bf16", Half("bf16")),
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
    with pytest.raises(UsageError, match=r"is not known: use none, fp16, bf16, topk:RATIO or pow"):
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
