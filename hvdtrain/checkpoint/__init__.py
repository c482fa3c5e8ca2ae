"""Checkpoints: tensors by parameter name, in one file per rank, independent of the plan."""

from hvdtrain.checkpoint.store import Checkpoint, best, load, load_newest, name_of, stored

__all__ = ["Checkpoint", "best", "load", "load_newest", "name_of", "stored"]
