"""Checkpoints made for tests, as ranks of a run would write them."""

from pathlib import Path

import ml_dtypes
import numpy as np

from hvdtrain.checkpoint import store
from hvdtrain.checkpoint.store import Checkpoint


def make(step: int) -> Checkpoint:
    draw = np.random.default_rng(step)
    tensors: dict[str, np.ndarray] = {
        "stem.conv.weight": draw.standard_normal((4, 3, 3, 3), np.float32),
        "stem.bn.running_mean": draw.standard_normal(4),
        "stem.bn.num_batches_tracked": np.array(step),
        "head.half": draw.standard_normal(5).astype(ml_dtypes.bfloat16),
        "head.none": np.empty((0, 3), np.float32),
    }
    optimizer = {
        "stem.conv.weight": {
            "exp_avg": np.ones((4, 3, 3, 3), np.float32),
            "step": np.array(3, np.float32),
        }
    }
    return Checkpoint(tensors, optimizer, {"step": step, "position": 64 * step})


def save(folder: Path, checkpoint: Checkpoint, ranks: int = 2) -> Path:
    """Write a checkpoint in one file per rank, dealing out the tensors in turn."""
    folder.mkdir(exist_ok=True)
    name = store.name_of(checkpoint.progress["step"])
    held = {f"{store.MODEL}{key}": value for key, value in checkpoint.tensors.items()}
    for parameter, entries in checkpoint.optimizer.items():
        held |= {f"{store.OPTIMIZER}{parameter}/{key}": value for key, value in entries.items()}
    for rank in range(ranks):
        share = list(held.items())[rank::ranks]
        store.write_part(folder, name, rank, dict(share))
    return store.commit(folder, name, range(ranks), checkpoint.progress, {"model": "cnn"})
