"""The operations by which replicas agree, against sizes worked out by hand."""

import pytest

from hvdtrain.options.requests import parse_compress_request
from hvdtrain.plan.traffic import (
    Gradient,
    Kind,
    Operation,
    Sizes,
    Traffic,
    as_matrix,
    bucket_traffic,
    meeting_operations,
)

MATRIX, ROW, VECTOR = Gradient(6, 10, True), Gradient(1, 7, True), Gradient(5)
BUCKET = (MATRIX, ROW, VECTOR)  # 72 values
SUM: Kind = "all_reduce"


@pytest.mark.parametrize(
    ("kind", "replicas", "sent"),
    [
        ("all_reduce", 2, 100),
        ("all_reduce", 4, 150),
        ("reduce_scatter", 4, 75),
        ("all_to_all", 4, 75),
        ("all_gather", 4, 300),
        ("all_gather", 1, 0),
    ],
)
def test_what_each_rank_sends(kind: Kind, replicas: int, sent: float) -> None:
    assert Operation(kind, 100).sent_bytes(replicas) == sent


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_an_all_reduce_sends_as_much(kind: Kind, replicas: int) -> None:
    one = Operation(kind, 840)
    alike = round(one.as_all_reduce(replicas))
    assert Operation("all_reduce", alike).sent_bytes(replicas) == pytest.approx(
        one.sent_bytes(replicas), rel=1e-2
    )


@pytest.mark.parametrize(
    ("method", "traffic"),
    [
        ("none", Traffic((Operation(SUM, 4 * 75),))),
        # 72 values become 3 slices of 24.
        (
            "fp16",
            Traffic(
                (Operation("all_to_all", 144), Operation(SUM, 12)), (Operation("all_gather", 48),)
            ),
        ),
        # 72 values become 3 slices of one block, and each block has a scale.
        (
            "int8",
            Traffic(
                (Operation("all_to_all", 3 * 260), Operation(SUM, 12)),
                (Operation("all_gather", 260),),
            ),
        ),
        ("topk:0.1", Traffic((Operation("all_gather", 8 * 8), Operation(SUM, 12)))),
        # The row and the vector are no smaller as factors: they travel with the statistics.
        (
            "powersgd:2",
            Traffic((Operation(SUM, 4 * (2 * 6 + 12 + 3)),), (Operation(SUM, 4 * 2 * 10),)),
        ),
        ("powersgd:9", Traffic((Operation(SUM, 4 * 75),))),
    ],
)
def test_the_sum_of_a_bucket(method: str, traffic: Traffic) -> None:
    assert bucket_traffic(parse_compress_request(method), BUCKET, 3, 3, 4) == traffic


def test_statistics_alone_travel_as_they_are() -> None:
    assert bucket_traffic(parse_compress_request("fp16"), (), 3, 2, 8) == Traffic(
        (Operation(SUM, 24),)
    )


@pytest.mark.parametrize(
    ("counters", "state", "operations"),
    [
        (3, 0, [4 * (72 + 6 + 2), 8 * 3]),
        (3, 147, [4 * (72 + 6 + 147 + 2), 8 * 3]),
        (0, 0, [4 * (72 + 6 + 2)]),
    ],
)
def test_a_meeting(counters: int, state: int, operations: list[int]) -> None:
    sizes = Sizes(BUCKET, averages=6, counters=counters)
    met = meeting_operations(sizes, 2, state)
    assert met == tuple(Operation(SUM, size) for size in operations)


@pytest.mark.parametrize(
    ("shape", "strides", "matrix"),
    [
        ((6, 10), (10, 1), (6, 10)),
        ((6, 10), (1, 6), (10, 6)),  # transposed
        ((5, 3, 2, 2), (12, 1, 6, 3), (5, 12)),  # channels_last
        ((1, 7), (7, 1), (7, 1)),
        ((), (), (1, 1)),
        ((0, 4), (4, 1), (0, 0)),
    ],
)
def test_the_rows_of_a_matrix(
    shape: tuple[int, ...], strides: tuple[int, ...], matrix: tuple[int, int]
) -> None:
    assert as_matrix(shape, strides) == matrix
