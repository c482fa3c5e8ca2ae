"""Compares reading photos at 224 pixels: hvdtrain, torch's DataLoader and Streaming; images/s.

    python benchmarks/images.py [--images 1500] [--rounds 3]
    python benchmarks/images.py --bookkeeping

All sides read the same JPEG files of 500x375 pixels, shuffled, and do the same work: decode, cut a
random part, scale it to 224 by Pillow's bilinear filter, flip half of them, batches of 64 uint8
images. The peers are DataLoader over the files, and DataLoader over MosaicML Streaming (if it is
installed) whose shards hold the same files, both with one worker per core. A further side reads
the same images packed as pixels of 256, and cuts parts of these.

With --bookkeeping it measures what a set of 1.3 million samples of 1,000 classes costs besides its
images: listing, ordering and identifying its files, its index, and the order of an epoch. No image
is read.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from comparison import compare
from PIL import Image

SIZE, STORED = 224, 256
CLASSES = 10
BATCH = 64
LARGE_IMAGES, LARGE_CLASSES = 1_300_000, 1_000


def main() -> None:
    """Run the rounds and print the rates, or the cost of a large set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bookkeeping", action="store_true")
    parser.add_argument("--files", type=int, default=LARGE_IMAGES, help="of --bookkeeping")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.bookkeeping:
            _bookkeeping(Path(folder), options.files)
        else:
            _compare(Path(folder), options.images, options.rounds)


def _compare(folder: Path, images: int, rounds: int) -> None:
    files = _make_photos(folder / "photos", images)
    sides = _sides(folder, files)
    size = sum(path.stat().st_size for path, _ in files) // len(files)
    title = f"{images:,} JPEG files of {size:,} bytes, batches of {BATCH} at {SIZE}x{SIZE}"
    compare(title, "images/s", sides, rounds)


def _make_photos(folder: Path, count: int) -> list[tuple[Path, int]]:
    """Write smooth pictures under weak noise, whose files are about as large as photos."""
    random = np.random.default_rng(0)
    files = []
    for number in range(count):
        coarse = random.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC))
        noise = random.integers(-20, 20, smooth.shape)
        path = folder / "train" / f"kind{number % CLASSES}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.clip(smooth + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(path, quality=90)
        files.append((path, number % CLASSES))
    for kind in range(CLASSES):
        (folder / "test" / f"kind{kind}").mkdir(parents=True)
        (folder / "test" / f"kind{kind}" / "0.jpg").write_bytes(files[kind][0].read_bytes())
    return files


def _sides(folder: Path, files: list[tuple[Path, int]]) -> dict[str, Callable[[int], float]]:
    from hvdtrain.data import pack

    photos = folder / "photos"
    pack(photos, folder / "files", encoding="jpeg", size=STORED)
    pack(photos, folder / "pixels", size=STORED)
    sides: dict[str, Callable[[int], float]] = {
        "hvdtrain, files": partial(_rate, partial(_ours, folder / "files")),
        "DataLoader, files": partial(_rate, partial(_torch, files)),
        "hvdtrain, pixels of 256": partial(_rate, partial(_ours, folder / "pixels")),
    }
    try:
        import streaming
    except Exception as error:  # it does not import with every version of its libraries
        print(f"without Streaming: {error}")
        return sides
    columns = {"image": "bytes", "label": "int"}
    with streaming.MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
        for path, label in files:
            writer.write({"image": path.read_bytes(), "label": label})
    return sides | {f"Streaming {streaming.__version__}": partial(_rate, partial(_mds, folder))}


def _rate(batches: Callable[[int], Iterable[Any]], number: int) -> float:
    """Return images per second of an epoch, from its first whole batch to its last."""
    ready = iter(batches(number))
    next(ready)
    start, count = time.perf_counter(), 0
    for images, _ in ready:
        assert tuple(images.shape[1:]) == (SIZE, SIZE, 3)
        count += len(images)
    return count / (time.perf_counter() - start)


def _ours(folder: Path, epoch: int) -> Iterator[Any]:
    from hvdtrain.config import TrainConfig
    from hvdtrain.data import Loader, open_split, order, read_index
    from hvdtrain.engine.feed import Feeder, augmentation

    index = read_index(folder).at_size(SIZE)
    config = TrainConfig(model="", data="", augment="resized-crop-flip")
    with open_split(index, "train") as samples:
        rows = order.training_order(index, np.arange(len(samples)), 0, epoch)
        requests = ((rows[i : i + BATCH],) * 2 for i in range(0, len(rows), BATCH))
        feeder = Feeder(samples, augmentation(config, epoch))
        with Loader(feeder, requests) as loader:
            yield from ((feed.images, feed.labels) for feed in loader)


def _torch(files: list[tuple[Path, int]], epoch: int) -> Iterable[Any]:
    return _data_loader(_Photos(files), shuffle=True)


def _data_loader(dataset: Any, shuffle: bool) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    workers = len(os.sched_getaffinity(0))
    return DataLoader(dataset, BATCH, shuffle=shuffle, num_workers=workers)


class _Photos:
    """A Dataset over image files, as tutorials write it."""

    def __init__(self, files: list[tuple[Path, int]]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> Any:
        path, label = self.files[number]
        with Image.open(path) as image:
            return _augmented(image), label


def _mds(folder: Path, epoch: int) -> Iterable[Any]:
    import io

    import streaming

    class Decoded(streaming.StreamingDataset):
        def __getitem__(self, number: int) -> Any:
            sample = super().__getitem__(number)
            with Image.open(io.BytesIO(sample["image"])) as image:
                return _augmented(image), sample["label"]

    streaming.base.util.clean_stale_shared_memory()
    dataset = Decoded(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)
    return _data_loader(dataset, shuffle=False)


def _augmented(image: Image.Image) -> Any:
    """Return a random part of a picture, by the same steps as hvdtrain's augmentation."""
    import torch

    from hvdtrain.data.augment import crop_box

    bits = torch.randint(0, 2**62, (1,)).numpy().astype(np.uint64)
    box = crop_box(image.height, image.width, bits)
    part = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR, box)
    pixels = np.array(part)
    return torch.from_numpy(pixels[:, ::-1].copy() if bits[0] & 1 else pixels)


def _bookkeeping(folder: Path, files: int) -> None:
    _list_files(folder, files)
    _index_and_order(folder, files)


def _list_files(folder: Path, files: int) -> None:
    """Measure the list of a folder of empty files."""
    from hvdtrain.data.listing import list_folder
    from hvdtrain.data.packing import PackOptions, pack_key

    for kind in range(LARGE_CLASSES):
        (folder / "images" / f"n{kind:08d}").mkdir(parents=True)
    for number in range(files):
        kind = number % LARGE_CLASSES
        path = folder / "images" / f"n{kind:08d}" / f"n{kind:08d}_{number}.jpeg"
        os.close(os.open(path, os.O_CREAT))
    listing = _measured("list and order the files", lambda: list_folder(folder / "images"))
    assert len(listing.splits["all"].paths) == files
    _print_numbers("a class per file, as numbers", listing.splits["all"].labels.nbytes)
    _measured("identify them, to resume", partial(pack_key, listing, PackOptions(), 64))


def _index_and_order(folder: Path, files: int) -> None:
    """Measure an index of as many images of 224 pixels, and the order of their epochs."""
    from hvdtrain.data.index import FORMAT_VERSION, Index, Shard, Split, parse_index
    from hvdtrain.data.order import holdout, step_slices, training_order

    per_shard = 440
    shards = tuple(
        Shard(f"train-{n:05d}.h5", min(per_shard, files - n * per_shard), 2**26, "0" * 64)
        for n in range(-(-files // per_shard))
    )
    split = Split("train", files, shards, 8)
    test = Split("test", 1, (Shard("test-00000.h5", 1, 2**20, "0" * 64),), 8)
    names = tuple(f"n{kind:08d}" for kind in range(LARGE_CLASSES))
    numbers = (0.5, 0.5, 0.5)
    index = Index(
        *(folder, FORMAT_VERSION, {"train": split, "test": test}, names, (224, 224, 3)),
        *(numbers, numbers),
    )
    (folder / "index.json").write_text(json.dumps(index.to_json()))
    _print_numbers("index.json", (folder / "index.json").stat().st_size)
    index = _measured("read the index", lambda: parse_index(folder))
    rows, _ = _measured("choose a hold-out", lambda: holdout(files, 0.1, index.hash, 0))
    for epoch in range(2):
        order_epoch = partial(training_order, index, rows, 0, epoch)
        order = _measured(f"order epoch {epoch}", order_epoch)
    _print_numbers("the order", order.nbytes)
    _measured("cut it into batches of 256", lambda: step_slices(len(order), 256))


def _measured(name: str, call: Callable[[], Any]) -> Any:
    start, cpu_start = time.perf_counter(), time.process_time()
    result = call()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{name:>30}: {seconds:8.2f} s, {cpu:.2f} s of a core; peak {peak:,.0f} MiB")
    return result


def _print_numbers(name: str, count: int) -> None:
    print(f"{name:>30}: {count / 2**20:8.1f} MiB")


if __name__ == "__main__":
    main()
