"""The loader's thread: batches in order, errors in the consumer, and no thread left behind."""

import itertools
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hvdtrain.data.augment import crop_flip
from hvdtrain.data.index import read_index
from hvdtrain.data.order import Loader
from hvdtrain.data.shards import Batch, Samples, open_split
from hvdtrain.errors import DataError, UsageError

Rows = NDArray[np.int64]


@pytest.fixture
def samples(packed: Path) -> Iterator[Samples]:
    with open_split(read_index(packed), "train") as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    others = threading.enumerate()  # runs that failed in this process may have left watchdogs
    yield
    left = [thread for thread in threading.enumerate() if thread not in others]
    assert not [thread.name for thread in left if thread.name.startswith("hvdtrain")]


def requests(count: int, size: int = 7) -> list[Rows]:
    generator = np.random.default_rng(1)
    return [generator.integers(0, 300, size) for _ in range(count)]


@pytest.mark.parametrize("prefetch", [1, 2, 50])
def test_batches_come_in_the_order_of_the_requests(samples: Samples, prefetch: int) -> None:
    requested = [*requests(20), np.array([], np.int64), *requests(3, 11)]
    with Loader(samples, requested, prefetch=prefetch) as loader:
        batches = list(loader)
    assert len(batches) == len(requested)
    for rows, batch in zip(requested, batches, strict=True):
        np.testing.assert_array_equal(batch.images, samples.gather(rows).images)
        assert batch.ids.tolist() == rows.tolist()
        assert len(batch) == len(rows)


def test_the_transform_is_applied_to_each_batch(samples: Samples) -> None:
    def augment(batch: Batch) -> Batch:
        assert isinstance(batch.images, np.ndarray)
        images = crop_flip(batch.images.astype(np.uint8), batch.ids, seed=3, epoch=1)
        return Batch(images, batch.labels, batch.ids)

    requested = requests(4)
    with Loader(samples, requested, augment) as loader:
        for rows, batch in zip(requested, loader, strict=True):
            plain = samples.gather(rows)
            expected = augment(plain)
            np.testing.assert_array_equal(batch.images, expected.images)
            assert (batch.images != plain.images).any()


class Drawn:
    """Requests that count how many were drawn; `most` is the largest lead over `used`."""

    def __init__(self, rows: Iterable[Rows]) -> None:
        self.rows, self.count, self.used, self.most = rows, 0, 0, 0
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[Rows]:
        for rows in self.rows:
            with self._changed:
                self.count += 1
                self.most = max(self.most, self.count - self.used)
                self._changed.notify()
            yield rows

    def wait_for(self, count: int) -> None:
        """Wait until `count` requests were drawn."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.count >= count, timeout=60)


def test_no_more_batches_are_made_ahead_than_asked(samples: Samples) -> None:
    drawn = Drawn(requests(50))
    with Loader(samples, drawn, prefetch=3) as loader:
        for used in range(1, 51):
            drawn.used = used
            next(loader)
            drawn.wait_for(min(used + 4, 50))
    assert drawn.most == 4, "three ready, one in progress"


@pytest.mark.parametrize("used", [0, 1, 3])
def test_closing_early_stops_the_thread_promptly(samples: Samples, used: int) -> None:
    drawn = Drawn(itertools.cycle(requests(1)))
    loader = Loader(samples, drawn, prefetch=1)
    for _ in range(used):
        next(loader)
    loader.close()
    loader.close()
    assert drawn.count <= used + 2, "one ready, one in progress"
    assert list(loader) == []


def test_closing_at_any_moment_never_hangs(samples: Samples) -> None:
    """The end of the requests, a full queue and close() coincide in all orders."""
    for round_number in range(300):
        with Loader(samples, requests(round_number % 4, 1), prefetch=1) as loader:
            for _ in range(round_number % 3):
                next(loader, None)


def test_an_error_comes_after_the_batches_before_it(samples: Samples) -> None:
    def third_fails(batch: Batch) -> Batch:
        if 2 in batch.ids:
            raise DataError("the third is damaged")
        return batch

    loader = Loader(samples, [np.array([row]) for row in range(5)], third_fails)
    assert next(loader).ids.tolist() == [0]
    assert next(loader).ids.tolist() == [1]
    with pytest.raises(DataError, match="the third is damaged"):
        next(loader)
    assert list(loader) == []


def test_an_error_in_the_requests_or_the_rows_reaches_the_consumer(samples: Samples) -> None:
    def broken() -> Iterator[Rows]:
        yield np.array([1])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(Loader(samples, broken()))
    with pytest.raises(IndexError, match="outside"):
        list(Loader(samples, [np.array([9999])]))


def test_a_consumer_that_fails_leaves_no_thread(samples: Samples) -> None:
    with pytest.raises(ValueError, match="consumer"), Loader(samples, requests(100)) as loader:
        next(loader)
        raise ValueError("consumer")


def test_a_damaged_shard_ends_the_loop_with_its_name(packed: Path) -> None:
    index = read_index(packed)
    shard = packed / "train-00000.h5"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 16
    shard.write_bytes(content)
    samples = open_split(index, "train")
    with pytest.raises(DataError, match=r"train-00000\.h5: chunk \d+ \(rows"):
        list(Loader(samples, requests(3)))


def test_a_prefetch_of_nothing_is_refused(samples: Samples) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        Loader(samples, [], prefetch=0)
