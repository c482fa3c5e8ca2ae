"""`bench loader`: measures how fast a data set is read, and the parts of that time."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from hvdtrain.bench.options import LoaderConfig
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.index import read_index
from hvdtrain.data.order import Loader
from hvdtrain.data.shards import Batch, Samples, open_split
from hvdtrain.engine.feed import Augmentation, augmentation

WARM_UP = 3  # batches


@dataclass(frozen=True)
class _Augmented:
    """A source of augmented batches for a `Loader`."""

    samples: Samples
    augmentation: Augmentation

    def gather(self, rows: order.Rows) -> Batch:
        """Read one batch."""
        return self.augmentation.gather(self.samples, rows)


def bench_loader(config: LoaderConfig) -> dict[str, Any]:
    """Return images per second of the loader, and of reading, augmentation and copying alone.

    Raises:
        UsageError, DataError: if the options or the data set are wrong.
    """
    index = read_index(config.data)
    training = TrainConfig(model="", data="", augment=config.augment)
    augment = augmentation(training, 0)
    memory = config.memory_mb * 2**20
    with open_split(index, "train", memory) as samples:
        # As in training: the memory must hold at least two windows.
        window = min(order.window_rows(index), max(1, memory // 2 // index.image_bytes))
        chunk_rows = samples.split.chunk_rows
        rows = order.epoch_order(np.arange(len(samples)), index.hash, 0, 0, chunk_rows, window)
        size = min(config.batch_size, len(rows))
        batches = [rows[start : start + size] for start in range(0, len(rows) - size + 1, size)]
        seconds = config.seconds / 4

        def requests() -> Any:
            return cycle(batches)

        with Loader(_Augmented(samples, augment), requests()) as loader:
            whole = _rate(lambda: next(loader), size, seconds)
        next_rows = requests()
        reading = _rate(lambda: samples.gather(next(next_rows), augment.picture), size, seconds)
        batch = samples.gather(batches[0])
        change = augment.batch
        augmenting = _rate(lambda: change(batch), size, seconds) if change else None
        copying = _rate(lambda: batch.images.copy(), size, seconds)
        return {
            "images": len(samples),
            "image_bytes": index.image_bytes,
            "batch_size": size,
            "in_memory": samples.in_memory,
            "images_per_second": whole,
            "reading": reading,
            "augmenting": augmenting,
            "copying": copying,
        }


def as_text(result: dict[str, Any]) -> str:
    """Return the text that `bench loader` prints."""
    where = "memory" if result["in_memory"] else "shards, in windows"
    lines = [
        f"{result['images']:,} images of {result['image_bytes']:,} bytes from {where}, "
        f"{result['batch_size']} per batch; images/s:"
    ]
    for name, key in (
        ("the loader", "images_per_second"),
        ("reading alone", "reading"),
        ("augmenting alone", "augmenting"),
        ("copying a batch in memory", "copying"),
    ):
        if result[key] is not None:
            lines.append(f"  {name:<26} {result[key]:>12,.0f}")
    return "\n".join(lines)


def _rate(make: Callable[[], Any], images: int, seconds: float) -> float:
    """Return the images per second of a function that makes a batch."""
    for _ in range(WARM_UP):
        make()
    began = time.perf_counter()
    count = 0
    while (now := time.perf_counter()) < began + seconds:
        make()
        count += 1
    return count * images / (now - began)
