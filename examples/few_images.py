"""Writes the first images of each class of a packed data set, and all test images, as .npz.

    python examples/few_images.py data/cifar10 few.npz [--images 100]

`hvdtrain data pack few.npz data/few` packs it. docs/how-to/fine-tune.md trains on it.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain import data


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a packed data set")
    parser.add_argument("to", type=Path, help="the .npz file")
    parser.add_argument("--images", type=int, default=100, help="of each class (default: 100)")
    options = parser.parse_args()
    arrays: dict[str, Any] = {}
    for split in ("train", "test"):
        with data.open_split(data.read_index(options.data), split) as samples:
            batch = samples.gather(np.arange(len(samples)))
        rows = np.arange(len(batch.labels))
        if split == "train":
            classes = np.unique(batch.labels)
            first = [np.flatnonzero(batch.labels == one)[: options.images] for one in classes]
            rows = np.sort(np.concatenate(first))
        arrays[f"{split}_images"] = batch.images[rows]
        arrays[f"{split}_labels"] = batch.labels[rows]
    np.savez(options.to, **arrays)


if __name__ == "__main__":
    main()
