"""Checkpoints made for tests, as ranks of a run would write them."""

from pathlib import Path

import torch

from hvdtrain.training.checkpoint import Checkpoint, store


def make(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "stem.conv.weight": torch.randn(4, 3, 3, 3, generator=generator),
        "stem.bn.running_mean": torch.randn(4, generator=generator, dtype=torch.float64),
        "stem.bn.num_batches_tracked": torch.tensor(step),
        "head.half": torch.randn(5, generator=generator).to(torch.bfloat16),
        "head.none": torch.empty(0, 3),
    }
    optimizer = {
        "stem.conv.weight": {"exp_avg": torch.ones(4, 3, 3, 3), "step": torch.tensor(3.0)}
    }
    return Checkpoint(tensors, optimizer, {"step": step, "position": 64 * step})


def save(folder: Path, checkpoint: Checkpoint, ranks: int = 2) -> Path:
    """Write it in one part a rank, tensor by tensor in turn."""
    folder.mkdir(exist_ok=True)
    name = store.name_of(checkpoint.progress["step"])
    held = {f"{store.MODEL}{key}": value for key, value in checkpoint.tensors.items()}
    for parameter, entries in checkpoint.optimizer.items():
        held |= {f"{store.OPTIMIZER}{parameter}/{key}": value for key, value in entries.items()}
    for rank in range(ranks):
        own = list(held.items())[rank::ranks]
        store.write_part(folder, name, rank, dict(own))
    return store.commit(folder, name, range(ranks), checkpoint.progress, {"model": "cnn"})
