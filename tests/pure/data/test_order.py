"""Each epoch uses each sample exactly once, in an order that is independent of the ranks."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdtrain.data import order
from hvdtrain.data.index import Index
from hvdtrain.errors import UsageError

HASH = "ab" * 32

counts = st.integers(0, 300)
seeds = st.integers(0, 2**31)
share_lists = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(lambda s: sum(s) > 0)


def an_order(
    count: int, seed: int = 0, epoch: int = 0, chunk: int = 8, window: int = 32
) -> list[int]:
    rows = np.arange(count, dtype=np.int64)
    return [int(row) for row in order.epoch_order(rows, HASH, seed, epoch, chunk, window)]


@pytest.mark.proves("Each epoch uses each sample once, also where batches and shares are uneven.")
@given(counts, seeds, st.integers(0, 50), st.integers(1, 40), st.integers(1, 400))
def test_an_epoch_holds_each_row_exactly_once(
    count: int, seed: int, epoch: int, chunk: int, window: int
) -> None:
    assert sorted(an_order(count, seed, epoch, chunk, window)) == list(range(count))


@given(st.sets(st.integers(0, 500), max_size=200), st.integers(1, 40), st.integers(1, 300))
def test_an_epoch_of_some_rows_holds_just_those(rows: set[int], chunk: int, window: int) -> None:
    chosen = np.array(sorted(rows), np.int64)
    assert sorted(order.epoch_order(chosen, HASH, 1, 2, chunk, window).tolist()) == sorted(rows)


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 100))
def test_a_chunk_is_read_in_one_window_of_bounded_size(
    count: int, chunk: int, window: int
) -> None:
    assume(window < count)
    chunks = np.array(an_order(count, chunk=chunk, window=window)) // chunk
    # Walk through the epoch: open a window at the first unseen chunk, close it when it is full.
    sizes = {number: int((chunks == number).sum()) for number in set(chunks.tolist())}
    place = 0
    seen: set[int] = set()
    while place < count:
        window_chunks: set[int] = set()
        while place + sum(sizes[number] for number in window_chunks) < count:
            span = chunks[place : place + max(1, sum(sizes[number] for number in window_chunks))]
            if set(span.tolist()) == window_chunks:
                break
            window_chunks |= set(span.tolist())
        held = sum(sizes[number] for number in window_chunks)
        assert not window_chunks & seen, "a chunk comes back in a later window"
        assert held <= window or len(window_chunks) == 1
        seen |= window_chunks
        place += held


def test_a_window_that_holds_all_shuffles_fully() -> None:
    mixed = np.array(an_order(4096, chunk=16, window=4096)) // 16
    # In a block shuffle with small windows neighbours share a chunk far more often.
    blocks = np.array(an_order(4096, chunk=16, window=32)) // 16
    assert (mixed[1:] == mixed[:-1]).mean() < 0.02
    assert (blocks[1:] == blocks[:-1]).mean() > 0.2


@pytest.mark.proves("The order of samples depends on the data set, the seed and the epoch alone.")
def test_the_order_changes_with_seed_epoch_and_data_set() -> None:
    rows = np.arange(100, dtype=np.int64)
    orders = [
        order.epoch_order(rows, index_hash, seed, epoch, 8, window).tolist()
        for index_hash in (HASH, "cd" * 32)
        for seed in (0, 1)
        for epoch in (0, 1)
        for window in (16, 100)
    ]
    assert len({tuple(rows_in_order) for rows_in_order in orders}) == len(orders)


def test_places_are_spread_evenly() -> None:
    """Each of 10 rows comes first in about 200 of 2000 epochs (standard deviation 13)."""
    first = np.bincount([an_order(10, epoch=epoch)[0] for epoch in range(2000)], minlength=10)
    assert first.min() > 140
    assert first.max() < 260


def test_the_order_is_the_same_for_ever() -> None:
    """A run that resumes with another version of any library keeps the same order."""
    assert an_order(12, seed=3, epoch=5) == GOLDEN_FULL
    assert an_order(24, seed=3, epoch=5, chunk=4, window=8) == GOLDEN_BLOCKS
    train, held = order.holdout(10, 0.3, HASH, 7)
    assert (train.tolist(), held.tolist()) == GOLDEN_HOLDOUT


GOLDEN_FULL = [5, 10, 7, 6, 2, 4, 8, 0, 9, 1, 11, 3]
GOLDEN_BLOCKS = [
    10,
    2,
    8,
    0,
    9,
    1,
    11,
    3,
    5,
    20,
    21,
    7,
    6,
    4,
    22,
    23,
    12,
    18,
    15,
    13,
    17,
    19,
    16,
    14,
]
GOLDEN_HOLDOUT = ([1, 3, 4, 5, 6, 7, 8], [0, 2, 9])


@given(st.integers(2, 300), st.floats(0, 0.999), seeds)
def test_holding_out_parts_the_rows_in_two(count: int, fraction: float, seed: int) -> None:
    train, held = order.holdout(count, fraction, HASH, seed)
    assert sorted(train.tolist() + held.tolist()) == list(range(count))
    assert train.tolist() == sorted(train.tolist())
    assert held.tolist() == sorted(held.tolist())
    assert len(train) >= 1
    assert abs(len(held) - fraction * count) <= 1
    assert (len(held) == 0) == (fraction == 0)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(UsageError, match="at least 0 and below 1"):
        order.holdout(10, fraction, HASH, 0)


@given(counts, share_lists)
def test_a_split_covers_the_range_in_proportion(count: int, shares: list[int]) -> None:
    parts = order.split(count, shares)
    assert [row for start, stop in parts for row in range(start, stop)] == list(range(count))
    for (start, stop), share in zip(parts, shares, strict=True):
        assert abs((stop - start) - count * share / sum(shares)) <= 1
        assert share > 0 or start == stop
    for share in set(shares):
        same = [
            stop - start for (start, stop), of in zip(parts, shares, strict=True) if of == share
        ]
        assert max(same) - min(same) <= 1


@pytest.mark.parametrize("shares", [[0, 0], [], [1, -1, 3]])
def test_shares_that_give_nothing_are_refused(shares: list[int]) -> None:
    with pytest.raises(UsageError, match="not all 0"):
        order.split(4, shares)


@given(st.integers(0, 200), st.integers(1, 20), share_lists)
def test_micro_batches_are_the_most_that_keep_all_busy(
    count: int, requested: int, shares: list[int]
) -> None:
    def all_busy(number: int) -> bool:
        return all(
            stop > start
            for replica, share in enumerate(shares)
            if share > 0
            for start, stop in order.share_rows(0, count, number, shares, replica)
        )

    chosen = order.microbatches(count, requested, shares)
    assert 1 <= chosen <= requested
    assert chosen == 1 or all_busy(chosen)
    assert not any(all_busy(number) for number in range(chosen + 1, requested + 1))


def samples_by_replica(
    share_rows: Callable[[int, int, int, list[int], int], list[tuple[int, int]]],
    count: int,
    batch_size: int,
    requested: int,
    shares: list[int],
) -> list[list[int]]:
    """Return the rows that each replica uses, in order, over an epoch of `count` rows."""
    epoch = an_order(count)
    used: list[list[int]] = [[] for _ in shares]
    for start, stop in order.step_slices(count, batch_size):
        number = order.microbatches(stop - start, requested, shares)
        for replica, rows in enumerate(used):
            for first, last in share_rows(start, stop, number, shares, replica):
                rows.extend(epoch[first:last])
    return used


@given(counts, st.integers(1, 70), st.integers(1, 8), share_lists)
def test_all_replicas_together_use_each_row_once(
    count: int, batch_size: int, requested: int, shares: list[int]
) -> None:
    used = samples_by_replica(order.share_rows, count, batch_size, requested, shares)
    assert sorted(row for rows in used for row in rows) == list(range(count))


def test_a_split_that_drops_the_uneven_rest_is_noticed() -> None:
    """Negative control: the usual `batch // replicas` loses samples, which the check detects."""

    def dropping(
        start: int, stop: int, number: int, shares: list[int], replica: int
    ) -> list[tuple[int, int]]:
        size = (stop - start) // len(shares)
        return [(start + replica * size, start + (replica + 1) * size)]

    used = samples_by_replica(dropping, 50, 16, 1, [1, 1, 1])
    assert sorted(row for rows in used for row in rows) != list(range(50))


@given(st.integers(0, 100), st.integers(1, 40), st.integers(1, 5), share_lists)
def test_micro_batches_are_contiguous_slices_whatever_the_shares(
    start: int, count: int, number: int, shares: list[int]
) -> None:
    parts = [order.share_rows(start, start + count, number, shares, r) for r in range(len(shares))]
    whole = order.share_rows(start, start + count, number, [1], 0)
    for k in range(number):
        rows = [row for part in parts for row in range(*part[k])]
        assert rows == list(range(*whole[k]))
    assert [row for part in whole for row in range(*part)] == list(range(start, start + count))


@pytest.mark.proves(
    "A resumed run uses exactly the samples that were left, and on as many ranks as "
    "before ends in the same bits."
)
@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 1000))
def test_resuming_anywhere_gives_the_rest(length: int, batch_size: int, position: int) -> None:
    epoch, offset = order.locate(position, length)
    assert epoch * length + offset == position
    whole = an_order(length, epoch=epoch)
    rest = [
        row
        for start, stop in order.step_slices(length, batch_size, offset)
        for row in whole[start:stop]
    ]
    assert rest == whole[offset:]
    if offset % batch_size == 0:
        steps = order.step_slices(length, batch_size)
        assert order.step_slices(length, batch_size, offset) == steps[offset // batch_size :]


def test_the_last_batch_of_an_epoch_is_as_short_as_what_is_left() -> None:
    assert order.step_slices(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert order.step_slices(8, 4) == [(0, 4), (4, 8)]
    assert order.step_slices(3, 4) == [(0, 3)]
    assert order.step_slices(10, 4, 9) == [(9, 10)]
    assert order.step_slices(10, 4, 10) == []


def test_a_batch_size_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        order.step_slices(10, 0)
    with pytest.raises(UsageError, match="at least 1"):
        order.microbatches(10, 0, [1])


def test_the_window_of_cifar_holds_all_of_it() -> None:
    index = Index(Path(), 1, {}, ("a", "b"), (32, 32, 3), (0.5,) * 3, (0.2,) * 3)
    assert order.window_rows(index) == 87381
