"""Checkpoints: tensors by parameter name, in parts that ranks write, under any plan the same."""

from hvdtrain.training.checkpoint.store import (
    Checkpoint,
    best,
    load,
    load_newest,
    name_of,
    stored,
)

__all__ = ["Checkpoint", "best", "load", "load_newest", "name_of", "stored"]
