"""Compares hvdtrain's loader with torch's DataLoader over h5py: images/s, waiting, and memory.

    python benchmarks/loader.py [--images 64] [--rounds 5]

Each side makes batches of shuffled images with random crop and flip, uint8 as stored. The peers
are torch's DataLoader over the same images in one HDF5 file, with a Dataset that reads and
augments one sample at a time as tutorials do, with 0 and 2 workers; and a copy of the same bytes
by NumPy, which no loader can beat. Then it prints the part of a CNN step that waits for data, and
the memory for a data set ten times larger than its limit.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import common
import numpy as np
import psutil
from comparison import compare

SET_IMAGES = 50_000
LARGE = 10  # size of the data set relative to its memory


def main() -> None:
    """Run the rounds and print the rates, then waiting and memory."""
    options = _options()
    if options.job is not None:
        _limited(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        from hvdtrain.data import synth

        synth(data, SET_IMAGES, common.CLASSES, size=common.SIZE)
        _rates(options, data, Path(folder) / "one.h5")
        _waiting(options, data, Path(folder) / "run")
        _memory(options, data)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=64, help="images per batch")
    parser.add_argument("--batches", type=int, default=300, help="batches that are timed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def _rates(options: argparse.Namespace, data: Path, file: Path) -> None:
    from hvdtrain.data import open_split, read_index

    with open_split(read_index(data), "train") as samples:
        _write_one_file(samples, file)
        sides: dict[str, Any] = {
            "hvdtrain": lambda number: _rate(options, _ours(samples, options, number)),
            "DataLoader, 0 workers": lambda number: _rate(options, _theirs(file, options, 0), 20),
            "DataLoader, 2 workers": lambda number: _rate(options, _theirs(file, options, 2), 20),
            "copy by NumPy": lambda number: _rate(options, _copies(samples, options)),
        }
        title = f"batches of {options.images} images of {common.SIZE}x{common.SIZE}"
        compare(title, "images/s", sides, options.rounds, warm_up=True)


def _rate(options: argparse.Namespace, batches: Iterable[Any], fewer: int = 1) -> float:
    """Return images per second after the first batch."""
    ready = iter(batches)
    next(ready)
    began = time.perf_counter()
    count = sum(1 for _ in islice(ready, options.batches // fewer))
    return float(count * options.images / (time.perf_counter() - began))


def _ours(
    samples: Any, options: argparse.Namespace, epoch: int, window: int | None = None
) -> Iterable[Any]:
    from hvdtrain.data import order
    from hvdtrain.data.augment import crop_flip
    from hvdtrain.data.order import Loader
    from hvdtrain.data.shards import Batch

    index = samples.index
    rows = order.epoch_order(
        *(np.arange(len(samples)), index.hash, 0, epoch),
        *(samples.split.chunk_rows, window or order.window_rows(index)),
    )
    requests = (
        rows[start : start + options.images] for start in range(0, len(rows), options.images)
    )

    def augment(batch: Batch) -> Batch:
        return Batch(crop_flip(batch.images, batch.ids, 0, epoch), batch.labels, batch.ids)

    with Loader(samples, requests, augment) as loader:
        yield from loader


def _write_one_file(samples: Any, file: Path) -> None:
    import h5py

    everything = samples.gather(np.arange(len(samples)))
    with h5py.File(file, "w") as target:
        target["images"], target["labels"] = everything.images, everything.labels


def _theirs(file: Path, options: argparse.Namespace, workers: int) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    dataset: Any = _OneFile(file)
    return DataLoader(dataset, options.images, shuffle=True, num_workers=workers)


class _OneFile:
    """A Dataset over one HDF5 file; each worker opens its own."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.opened: Any = None

    def __len__(self) -> int:
        return SET_IMAGES

    def __getitem__(self, number: int) -> Any:
        import h5py
        import torch

        if self.opened is None:
            self.opened = h5py.File(self.file, "r")
        image = torch.from_numpy(self.opened["images"][number]).permute(2, 0, 1)
        top, left, mirrored = (int(torch.randint(limit, ())) for limit in (9, 9, 2))
        image = torch.nn.functional.pad(image, (4, 4, 4, 4))
        image = image[:, top : top + common.SIZE, left : left + common.SIZE]
        return image.flip(2) if mirrored else image, int(self.opened["labels"][number])


def _copies(samples: Any, options: argparse.Namespace) -> Iterable[Any]:
    everything = samples.gather(np.arange(len(samples)))
    while True:
        for start in range(0, SET_IMAGES - options.images, options.images):
            yield everything.images[start : start + options.images].copy()


def _waiting(options: argparse.Namespace, data: Path, run: Path) -> None:
    """Print the part of the steps of a CNN that waits for the loader."""
    command = f"bench step --model cnn --precision bf16 --batch-size {options.images} --json"
    command += f" --data {data} --augment crop-flip --steps 200"
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", *command.split()],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout)
    step, waited = result["step_seconds"]["median"], result["seconds"]["data"]
    print(f"waiting for data: {waited / step:.2%} of a CNN step of {1e3 * step:.2f} ms")


def _memory(options: argparse.Namespace, data: Path) -> None:
    """Measure a data set ten times larger than its memory limit, in a separate process."""
    command = [sys.executable, __file__, "--job", str(data), "--images", str(options.images)]
    result = json.loads(common.run_all([command], threads=1)[0])
    print(
        f"{result['set_mib']:.0f} MiB of images in at most {result['memory_mib']:.0f} MiB: "
        f"{result['rate']:,.0f} images/s, the process grew by {result['grown_mib']:.0f} MiB"
    )


def _limited(options: argparse.Namespace) -> None:
    """Read one epoch of a data set that does not fit; memory holds two windows, as in training."""
    from hvdtrain.data import open_split, read_index

    index = read_index(options.job)
    memory = SET_IMAGES * index.image_bytes // LARGE
    with open_split(index, "train", memory) as samples:
        assert not samples.in_memory
        process = psutil.Process()
        before = largest = process.memory_info().rss
        began, count = time.perf_counter(), 0
        for batch in _ours(samples, options, 0, memory // 2 // index.image_bytes):
            count += len(batch.images)
            largest = max(largest, process.memory_info().rss)
        seconds = time.perf_counter() - began
    grown = (largest - before) / 2**20
    assert count == SET_IMAGES
    print(
        json.dumps(
            {
                "set_mib": SET_IMAGES * index.image_bytes / 2**20,
                "memory_mib": memory / 2**20,
                "rate": count / seconds,
                "grown_mib": grown,
            }
        )
    )


if __name__ == "__main__":
    main()
