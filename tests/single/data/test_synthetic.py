"""The synthetic data set has the same bytes for the same seed, and can be learned."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.data.index import Index
from hvdtrain.data.shards import open_split
from hvdtrain.data.sources import class_patterns, synth
from hvdtrain.errors import UsageError


def split_of(index: Index, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normalised images, float32 [n, 3, size, size], and labels."""
    with open_split(index, name) as samples:
        batch = samples.gather(np.arange(len(samples)))
    images = torch.from_numpy(batch.images.astype(np.float32)).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (index.mean, index.std))
    return (images - mean) / std, torch.from_numpy(batch.labels)


@pytest.mark.proves(
    "`data synth` makes a set that a small network can learn, the same from the same "
    "seed; `data verify` names every bad shard and chunk."
)
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    """The bytes are the same at another time of day, which HDF5 would write into each file."""
    one = synth(tmp_path / "one", 200, 3, 16, seed=4)
    second = int(time.time())
    while int(time.time()) == second:
        time.sleep(0.01)
    two = synth(tmp_path / "two", 200, 3, 16, seed=4)
    assert one.hash == two.hash
    for path in sorted((tmp_path / "one").iterdir()):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    other = synth(tmp_path / "other", 200, 3, 16, seed=5)
    assert other.hash != one.hash
    assert not torch.equal(split_of(one, "train")[0], split_of(other, "train")[0])


def test_samples_do_not_depend_on_how_they_are_cut_into_shards(tmp_path: Path) -> None:
    one = synth(tmp_path / "one", 150, 3, 64, shard_mb=1)
    many = synth(tmp_path / "many", 150, 3, 64, shard_mb=64)
    assert len(one.splits["train"].shards) > len(many.splits["train"].shards)
    assert torch.equal(split_of(one, "train")[0], split_of(many, "train")[0])


def test_pixels_are_the_same_for_ever(tmp_path: Path) -> None:
    """Integer arithmetic gives the same values on every machine and version."""
    assert class_patterns(2, 8, seed=1)[:, 3, 2].tolist() == GOLDEN_PATTERNS
    index = synth(tmp_path / "set", images=5, classes=2, size=8, seed=1)
    with open_split(index, "train") as samples:
        assert samples.gather(np.arange(5)).images[:, 3, 2].tolist() == GOLDEN_IMAGES


GOLDEN_IMAGES = [[105, 231, 170], [214, 132, 140], [109, 182, 199], [153, 39, 92], [88, 147, 128]]
GOLDEN_PATTERNS = [[77, -68, -38], [-36, 53, -36]]


def test_counts_labels_and_splits(tmp_path: Path) -> None:
    index = synth(tmp_path / "set", images=101, classes=4, size=9)
    assert {name: split.count for name, split in index.splits.items()} == {
        "train": 101,
        "test": 20,
    }
    assert index.image_shape == (9, 9, 3)
    assert index.classes == 4
    train, test = split_of(index, "train"), split_of(index, "test")
    assert torch.bincount(train[1]).tolist() == [26, 25, 25, 25]
    assert torch.bincount(test[1]).tolist() == [5, 5, 5, 5]
    seen = {image.numpy().tobytes() for image in torch.cat([train[0], test[0]])}
    assert len(seen) == 121


@pytest.mark.parametrize(
    ("images", "classes", "size"), [(0, 2, 32), (10, 1, 32), (10, 2, 5), (10, 2, 2000)]
)
def test_numbers_out_of_range_are_refused(
    tmp_path: Path, images: int, classes: int, size: int
) -> None:
    with pytest.raises(UsageError, match=r"choose from \d+ to \d+"):
        synth(tmp_path / "set", images, classes, size)


def test_a_small_network_learns_it_but_not_at_once(tmp_path: Path) -> None:
    """The accuracy is far above chance (0.2) after four epochs of 2500 images, but not perfect."""
    index = synth(tmp_path / "set", images=2500, classes=5, size=16)
    (images, labels), (test_images, test_labels) = (
        split_of(index, "train"),
        split_of(index, "test"),
    )
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(4):
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    assert 0.4 < accuracy < 0.95, accuracy
