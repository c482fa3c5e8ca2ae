"""The data set of a run: the size at which it is read, and the size that the model takes."""

from dataclasses import replace

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Index, parse_index, read_index


def index_for(config: TrainConfig, checks_files: bool = True) -> Index:
    """Return the data set of a run, at the size at which it is read.

    Args:
        checks_files: check that all shards are there, with their sizes. One rank of a host is
            enough: a large set has tens of thousands of them, on a file system that all share.

    Raises:
        DataError: if there is none.
        UsageError: if its pixels are fewer than the model takes, and the run is not emulated.
    """
    # Emulated components look at a few pixels, so any data set serves a model of any size.
    index = read_index(config.data) if checks_files else parse_index(config.data)
    return index.at_size(None if config.emulate else config.image_size)


def as_modelled(index: Index, config: TrainConfig) -> Index:
    """Return the data set with the images that the model of a run takes."""
    if config.emulate is None or config.image_size is None:
        return index
    return replace(index, image_shape=(config.image_size,) * 2 + index.image_shape[2:])
