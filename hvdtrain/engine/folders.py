"""The folders of a run: that of its records, and the data set at the size that it is read at."""

from dataclasses import replace
from pathlib import Path

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Index, parse_index, read_index
from hvdtrain.errors import DataError, UsageError
from hvdtrain.world import World


def shared_index(config: TrainConfig, world: World) -> Index:
    """Return what `index_for` returns. Collective.

    One rank of a host checks that all shards are there: a large set has tens of thousands of them,
    on a file system that all share.

    Raises:
        DataError, UsageError: on all ranks, the error of the first one that has one.
    """
    index, fault = None, None
    try:
        index = index_for(config, checks_files=world.local_rank == 0)
    except (DataError, UsageError) as error:
        fault = error
    for rank_fault in world.gather(fault):
        if rank_fault is not None:
            raise rank_fault
    assert index is not None
    return index


def index_for(config: TrainConfig, checks_files: bool = True) -> Index:
    """Return the data set of a run, at the size at which it is read.

    Args:
        checks_files: check that all shards are there, with their sizes.

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


class RunFolder:
    """Paths of everything in a run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.heartbeats = path / "heartbeats"
