"""Mean and standard deviation that images are normalised by."""

import numpy as np

from hvdtrain.data.histogram import count_values, mean_and_std
from hvdtrain.data.index import Index
from hvdtrain.data.order import Rows
from hvdtrain.data.shards import open_split
from hvdtrain.world import World

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation per channel
BLOCK_ROWS = 4096


def normalisation(how: str, index: Index, rows: Rows, world: World) -> Normalisation:
    """Return mean and deviation per channel, for pixels in 0..1. Collective.

    If a part of the train split is held out, rank 0 measures the other part.

    Args:
        how: the value of --normalise.
        rows: the rows of the train split to train on.

    Raises:
        DataError: if a shard is damaged.
    """
    if how == "unit":
        return index.normalisation("unit")
    if how == "split" or len(rows) == index.splits["train"].count:
        return index.normalisation("meanstd")
    measured: Normalisation = world.broadcast(_of_rows(index, rows) if world.rank == 0 else None)
    return measured


def _of_rows(index: Index, rows: Rows) -> Normalisation:
    """Return mean and deviation over some rows of the train split, which are read for it."""
    histogram = np.zeros((index.image_shape[2], 256), np.int64)
    with open_split(index, "train") as samples:
        for start in range(0, len(rows), BLOCK_ROWS):
            count_values(samples.gather(rows[start : start + BLOCK_ROWS]).images, histogram)
    return mean_and_std(histogram)
